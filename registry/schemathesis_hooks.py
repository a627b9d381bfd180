"""Bodies that schemathesis cannot make from openapi.json."""

import schemathesis
from hypothesis import strategies

schemathesis.openapi.media_type("application/vnd.pf.frames.v1", strategies.binary(max_size=300))
