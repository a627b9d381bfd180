"""An agent in a process of its own, to be stopped by a signal: pauses the engine, and ends the
pause when a line comes."""

from __future__ import annotations

import json
import sys

from fake_agent import FakeAgent

agent = FakeAgent(sys.argv[1])
link = agent.link(0)
print(json.dumps(link.call("pause", {"pause": "p-1", "limit_ms": int(sys.argv[2])})), flush=True)
sys.stdin.readline()
print(json.dumps(link.call("resume", {"pause": "p-1"})), flush=True)
