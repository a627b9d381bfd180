"""The sidecar between the agent and vLLM's HTTP interface: which requests it makes, and what it says when they fail."""

from __future__ import annotations

import http.server
import json
import socketserver
import tempfile
import threading
import unittest
from pathlib import Path

from fake_agent import FakeAgent
from pf_connector.vllm.control import serve

INFO = {"engine": "vllm-0", "world": 2, "deployment": {"weights": "w", "engine": "vllm/0", "backend": "b"}}


class Control(socketserver.ThreadingUnixStreamServer):
    """The agent's control interface: one engine."""


class Sidecar(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.status = 200
        self.posted: list[str] = []
        test = self

        class Vllm(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                test.posted.append(self.path)
                self.send_response(test.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing."""

        class Agent(Vllm):
            def do_GET(self) -> None:
                body = json.dumps(INFO).encode()
                self.send_response(200 if self.path == "/v1/engines/vllm-0" else 404)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def address_string(self) -> str:
                return "unix"

        vllm = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Vllm)
        path, control_path = (str(Path(folder.name) / name) for name in ("engines", "control"))
        control = Control(control_path, Agent)
        for server in (vllm, control):
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self.addCleanup(server.server_close)
            self.addCleanup(server.shutdown)
        self.agent = FakeAgent(path)
        self.addCleanup(self.agent.close)
        stop = threading.Event()
        url = f"http://127.0.0.1:{vllm.server_port}/"
        sidecar = threading.Thread(target=serve, args=("vllm-0", url, path, control_path, stop))
        sidecar.start()
        self.addCleanup(sidecar.join)
        self.addCleanup(stop.set)
        self.link = self.agent.link(0)

    def test_it_says_the_same_deployment_as_the_other_members(self) -> None:
        expected = {"engine": "vllm-0", "member": "control", "verbs": ["pause"], "world": 2, "deployment": INFO["deployment"]}
        self.assertEqual(self.link.register, {"protocol": 2, **expected})

    def test_requests_are_kept_and_so_are_caches(self) -> None:
        self.assertEqual(self.link.call("pause")["ok"], {})
        self.assertEqual(self.link.call("resume")["ok"], {"held": True})
        self.assertEqual(self.posted, ["/pause?mode=keep&clear_cache=false", "/resume"])

    def test_a_server_without_these_paths_is_named(self) -> None:
        self.status = 404
        error = self.link.call("pause")["error"]
        self.assertEqual(error["code"], "engine_refused")
        self.assertIn("VLLM_SERVER_DEV_MODE", error["detail"])


if __name__ == "__main__":
    unittest.main()
