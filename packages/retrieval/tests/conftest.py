import pytest
from plumbob.retrieval import Document

FRUIT = [
    Document("a", "Red apple", "apple pie"),
    Document("b", "Green pear", "pear tart"),
    Document("c", "Blue", "sky"),
]


@pytest.fixture
def fruit() -> list[Document]:
    return list(FRUIT)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """One cache, so one loaded model, for the session."""
    return tmp_path_factory.mktemp("cache")
