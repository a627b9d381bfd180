"""The sidecar of `vllm serve`: its deployment, its requests, and how it follows a restart."""

from __future__ import annotations

import http.server
import json
import socketserver
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from fake_agent import FakeAgent
from pf_connector.vllm import control
from pf_connector.vllm.control import serve

DEPLOYMENT = {"weights": "w", "engine": "vllm/0", "backend": "b"}


def engine(**changed: Any) -> dict[str, Any]:
    """What the agent says of an engine whose worker is there."""
    return {"engine": "vllm-0", "world": 2, "deployment": DEPLOYMENT, "groups": ["full-attention-0"], "verbs": ["table"], **changed}


class Control(socketserver.ThreadingUnixStreamServer):
    """The agent's control interface: one engine."""

    daemon_threads = True


class Sidecar(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.status = 200
        self.posted: list[str] = []
        self.info: dict[str, Any] | None = engine()
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
                info = test.info if self.path == "/v1/engines/vllm-0" else None
                body = json.dumps(info or {"code": "engine_unknown"}).encode()
                self.send_response(200 if info else 404)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def address_string(self) -> str:
                return "unix"

        patch = mock.patch.object(control, "_LOOK", 0.02)
        patch.start()
        self.addCleanup(patch.stop)
        vllm = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Vllm)
        path, control_path = (str(Path(folder.name) / name) for name in ("engines", "control"))
        for server in (vllm, Control(control_path, Agent)):
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
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

    def test_it_says_the_same_deployment_as_the_other_members(self) -> None:
        expected = {"engine": "vllm-0", "member": "control", "verbs": ["pause"], "world": 2, "deployment": DEPLOYMENT}
        self.assertEqual(self.agent.link(0).register, {"protocol": 2, **expected})

    def test_requests_are_kept_and_so_are_caches(self) -> None:
        link = self.agent.link(0)
        self.assertEqual(link.call("pause")["ok"], {})
        self.assertEqual(link.call("resume")["ok"], {"held": True})
        self.assertEqual(self.posted, ["/pause?mode=keep&clear_cache=false", "/resume"])

    def test_a_server_without_these_paths_is_named(self) -> None:
        self.status = 404
        error = self.agent.link(0).call("pause")["error"]
        self.assertEqual(error["code"], "engine_refused")
        self.assertIn("VLLM_SERVER_DEV_MODE", error["detail"])

    def test_it_leaves_with_the_server_and_says_what_the_next_one_says(self) -> None:
        link = self.agent.link(0)
        with self.assertLogs("pf_connector", "WARNING") as logs:
            # The server has ended: only the sidecar holds the engine, with the old deployment.
            self.info = engine(groups=[], verbs=["pause"])
            self.assertTrue(link.ended.wait(10))
            self.info = None
        self.assertIn("vllm-0 has left", logs.output[0])
        self.info = engine(world=1, deployment={**DEPLOYMENT, "weights": "other"})
        found = self.agent.link(1).register
        self.assertEqual((found["world"], found["deployment"]["weights"]), (1, "other"))

    def test_it_asks_again_when_it_is_refused(self) -> None:
        self.agent.link(0)
        self.agent.refuse = {"code": "invalid_request", "detail": "its deployment is not that of the others: weights"}
        with self.assertLogs("pf_connector", "WARNING") as logs:
            self.agent.links[0].close()
            # In this order: what is refused was asked for before the change.
            self.agent.wait_for(lambda links: len(links) > 1)
            self.info = engine(deployment={**DEPLOYMENT, "weights": "other"})
            self.agent.refuse = None
            found = self.agent.wait_for(lambda links: [link for link in links[1:] if link.registered.is_set()])
        self.assertEqual(found[0].register["deployment"]["weights"], "other")
        self.assertIn("not that of the others", " ".join(logs.output))


if __name__ == "__main__":
    unittest.main()
