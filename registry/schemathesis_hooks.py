"""Bodies that schemathesis cannot make from openapi.json, and requests that it must not make."""

import os
from typing import Any

import schemathesis
from hypothesis import strategies

schemathesis.openapi.media_type("application/vnd.pf.frames.v1", strategies.binary(max_size=300))


@schemathesis.hook
def filter_path_parameters(context: schemathesis.HookContext, path_parameters: dict[str, Any] | None) -> bool:
    """Keeps the token of this run: schemathesis finds its id in the list, and would revoke it."""
    return (path_parameters or {}).get("token") != os.environ["PF_TOKEN_ID"]
