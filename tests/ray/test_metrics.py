"""Pages of replicas become one page."""

from prometheus_client.parser import text_string_to_metric_families

from enginewright.ray.metrics import merged
from tests.helpers.serving import running


def test_pages_of_a_server_are_joined() -> None:
    with running() as server:
        server.complete("a", max_tokens=2)
        page = server.ask("GET", "/metrics").body.decode()
    both = merged({"a": page, "b": page}).decode()
    single = {family.name: family for family in text_string_to_metric_families(page)}
    joined = {family.name: family for family in text_string_to_metric_families(both)}
    assert set(joined) == set(single) and len(joined) > 30
    for name, family in joined.items():
        assert family.type == single[name].type and family.documentation == single[name].documentation
        for replica in ("a", "b"):
            mine = [one for one in family.samples if one.labels["replica"] == replica]
            without = [(one.name, {k: v for k, v in one.labels.items() if k != "replica"}, one.value) for one in mine]
            assert without == [(one.name, one.labels, one.value) for one in single[name].samples]


def test_no_pages() -> None:
    assert merged({}) == b""
