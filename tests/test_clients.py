"""The official Python client over a tiny model. More clients, and a real model: ``tests/clients/run.sh``."""

from collections.abc import Callable, Iterator

import openai
import pytest
from tiny import roomy, write_model

from tests.clients.try_openai import CHECKS
from tests.operator_oracle import at_rest
from tests.serving import Server, serving

TEMPLATE = "{# tools <tool_call> #}{% for m in messages %}{{ m.content }}\n{% endfor %}"
"""Says nothing of tools: their explanation would not fit this model's context."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, programs_dir: str) -> Iterator[Server]:
    folder = write_model(tmp_path_factory.mktemp("clients") / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with roomy(programs_dir, folder, served_name="tiny") as llm, serving(llm, close_llm=False) as found:
        yield found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_official_python_client(server: Server, check: Callable[[openai.OpenAI, str], object]) -> None:
    with server.client() as client:
        check(client, "tiny")
    at_rest(server)
