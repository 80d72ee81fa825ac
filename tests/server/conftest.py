"""A chat server whose model says what a test puts into its mouth, and the openai client that asks it."""

import openai
import pytest
from chat_models import Asker, Scripted
from served import serving


@pytest.fixture(scope="module")
def scripted():
    with Scripted() as model:
        yield model


@pytest.fixture(scope="module")
def http(scripted):
    with serving(scripted.llm) as client:
        yield client


@pytest.fixture
def ask(http, scripted):
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield Asker(client)
    scripted.says = None
