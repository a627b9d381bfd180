"""What all connectors share: the protocol of the capture agent, memory, identity. Each engine's
connector is a package within."""

from pkgutil import extend_path

__version__ = "0.1.0"

# A checkout has each engine's package in a folder of its own; an installation has them here.
__path__ = extend_path(__path__, __name__)
