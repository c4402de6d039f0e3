"""`hone sample`: what is sent to a sampler, and what is printed of its answer. The real sampler is
asked in tests/system/test_loop.py."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from hone.cli import app

MODELS = {"object": "list", "data": [{"id": "owner/base"}, {"id": "policy"}]}
CHOICES = {
    "/v1/completions": {"index": 0, "text": "[42]", "finish_reason": "stop"},
    "/v1/chat/completions": {"message": {"content": "42"}, "finish_reason": "length"},
}


class Sampler(BaseHTTPRequestHandler):
    """Answers in OpenAI's shape, as vLLM does."""

    asked: tuple[str, dict[str, Any]]

    def do_GET(self) -> None:
        self._answer(200, MODELS)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Sampler.asked = (self.path, body)
        if body["max_tokens"] > 1000:
            self._answer(400, {"error": {"message": "max_tokens is too large"}})
        else:
            self._answer(200, {"model": body["model"], "choices": [CHOICES[self.path]]})

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        text = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Sampler)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    serving.join()


def sample(url: str, *words: str, stdin: str | None = None) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["sample", *words], input=stdin, env={"HONE_ROLLOUT_URL": url})
    return done.exit_code, done.stdout, done.stderr


def test_the_serving_weights_complete_a_prompt_of_stdin(url: str) -> None:
    code, shown, _ = sample(url, "-n", "2", "--max-tokens", "6", stdin="6 * 7 =")
    assert code == 0 and shown.splitlines()[1].split() == ["[42]", "stop"]
    assert Sampler.asked == (
        "/v1/completions",
        {"n": 2, "max_tokens": 6, "temperature": 1.0, "prompt": "6 * 7 =", "model": "policy"},
    )


def test_a_chat_goes_through_the_template_with_a_system_message(url: str) -> None:
    words = ("owner/base", "--chat", "--system", "be brief", "--prompt", "6*7?", "-o", "json")
    code, shown, _ = sample(url, *words)
    assert code == 0 and json.loads(shown)["choices"][0]["message"]["content"] == "42"
    path, body = Sampler.asked
    assert (path, body["model"]) == ("/v1/chat/completions", "owner/base")
    assert body["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "6*7?"},
    ]


def test_what_the_sampler_refuses_is_a_sentence(url: str) -> None:
    code, _, said = sample(url, "--prompt", "a", "--max-tokens", "2000")
    assert code == 2 and "max_tokens is too large" in said
    code, _, said = sample(url, "demo", "--prompt", "a")
    assert code == 2 and "does not serve 'demo'; its models are 'owner/base', 'policy'" in said
    code, _, said = sample(url, "--system", "be brief", "--prompt", "a")
    assert code == 2 and "expected --chat" in said
