"""GET /v1/models and /v1/models/{model}: what a client asks before anything else, through OpenAI's own client."""

import openai
import pytest
from models import small_llm
from served import error_of, serving


@pytest.mark.parametrize("name", ["tiny", "org/berrylm-nano"])
def test_the_served_model_can_be_retrieved_by_its_name(name):
    """API-1: the list had the model, and asking for it by name was a 404; names of checkpoints hold slashes."""
    with serving(small_llm(), name=name) as http:
        with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
            (listed,) = client.models.list().data
            assert client.models.retrieve(name) == listed and listed.id == name
            for other in ("gpt-4", "org", f"{name}/", f"x/{name}"):
                with pytest.raises(openai.NotFoundError) as error:
                    client.models.retrieve(other)
                assert error.value.code == "model_not_found" and repr(other) in error.value.message
        assert http.get(f"/v1/models/{name}").json() == http.get("/v1/models").json()["data"][0], "slashes as they stand"
        assert error_of(http.get("/v1/models/none"), 404)["param"] == "model"
