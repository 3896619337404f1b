"""A small, seeded run of ``tests.fuzz``, which says what it checks; ``tests/test_openapi.py`` tries the limits."""

from tests.fake_llm import FakeLLM
from tests.fuzz import check_well, fuzz
from tests.serving import serving


def test_random_requests_after_the_description_get_what_it_describes():
    with serving(FakeLLM(most=200_000)) as server:
        well, made, report = fuzz(server, each=25, limits=False)
        assert well, report
        assert made > 150
        check_well(server)
