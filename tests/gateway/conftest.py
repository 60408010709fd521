import pytest
from gateways import tiny_template

from rollart.gateway.template import ChatTemplate


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return tiny_template(tmp_path_factory.mktemp("tiny"))
