"""The connector for SGLang: a plugin of its scheduler.

    PF_SGLANG='{"engine": "sglang-0"}' python -m sglang.launch_server …

SGLang loads it by the entry point `sglang.srt.plugins` of the installed package, in each of its
processes. Without `PF_SGLANG` it does nothing. `hooks` says where it is called, `engine` what it
does. SGLang is never paused.
"""

from pf_connector.identity import adapter

from .deployment import deployment
from .plugin import VARIABLE, load

__all__ = ["VARIABLE", "adapter", "deployment", "load"]
