"""README's commands, word for word but for the port."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.frontend.cli.test_serve_and_bench import RealServe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    serve = RealServe(tmp_path_factory.mktemp("s"), model="demo", frontends=1)
    try:
        yield serve.url.removesuffix("/v1")
    finally:
        serve.close()


def test_the_curl_command_is_answered(served: str) -> None:
    (command,) = [block for block in blocks("sh") if "curl" in block]
    result = subprocess.run(
        ["bash", "-c", command.replace("http://127.0.0.1:8000", served)], capture_output=True, text=True, check=True
    )
    assert "Anna" in json.loads(result.stdout)["choices"][0]["message"]["content"]


def test_the_openai_client_streams_the_answer(served: str) -> None:
    program, _ = blocks("python")
    result = subprocess.run(
        [sys.executable, "-c", program.replace("http://127.0.0.1:8000", served)],
        capture_output=True,
        text=True,
        env=os.environ | {"NO_PROXY": "127.0.0.1"},
    )
    assert result.returncode == 0, result.stderr
    assert "Anna" in result.stdout


def test_the_guide_to_states_runs(served: str) -> None:
    guide = (ROOT / "docs" / "states.md").read_text()
    (script,) = re.findall(r"^```sh\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    script = "set -e\n" + script.replace("http://127.0.0.1:8000", served).replace("curl -s", "curl -sS --fail")
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert '"states":["way@101","way@100"' in result.stdout


def test_a_session_is_kept_and_goes_on(served: str) -> None:
    program = "\n".join([*blocks("python"), 'print("then:", say("What is my name?", state="anna@1"))'])
    result = subprocess.run(
        [sys.executable, "-c", program.replace("http://127.0.0.1:8000", served)],
        capture_output=True,
        text=True,
        env=os.environ | {"NO_PROXY": "127.0.0.1"},
    )
    assert result.returncode == 0, result.stderr
    assert "Anna" in result.stdout.partition("then:")[2]


def test_a_name_told_at_the_start_is_known_many_turns_later(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with OpenAI(base_url=f"{served}/v1", api_key="none") as client:
        messages: list[ChatCompletionMessageParam] = []

        def say(text: str) -> str:
            messages.append({"role": "user", "content": text})
            reply = client.chat.completions.create(
                model="wkvm-demo", messages=messages, max_tokens=60, temperature=0
            ).choices[0]
            answer = reply.message.content or ""
            messages.append({"role": "assistant", "content": answer})
            return answer

        say("Hi! My name is Tom.")
        between = ("I live in Paris.", "My favourite color is blue.", "What can you do?", "Count to three.", "Good.")
        answers = [say(text) for text in between]
        assert not any("Tom" in answer for answer in answers)  # it is not merely repeating its own last words
        assert "Tom" in say("What is my name?")
        assert "Paris" in say("Where do I live?")


def test_every_document_and_script_that_is_named_is_there() -> None:
    named = set(re.findall(r"\b(?:docs|scripts|wkvm_core|wkvm_frontend|wkvm_proto)/[\w./-]*\w", README))
    assert named
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]
