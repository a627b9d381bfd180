"""The connector for SGLang: an external linker of its unified radix cache.

Not run with SGLang itself: it is tested against the linker's interface (SGLang 0.5.23), see the
README of this folder.
"""

from pf_connector.identity import adapter

from .deployment import deployment
from .linker import Hold, PfLinker, Pool, Request

__all__ = ["Hold", "PfLinker", "Pool", "Request", "adapter", "deployment"]
