"""What an owner lets go of by itself, and the names that models go by."""

import logging
import os
import threading
from types import SimpleNamespace

import pytest
from sidecars import connect, damage, link, load, thread, until
from tiny import FIXTURES, write_model

from jaxserve.commands import sidecar as command
from jaxserve.sidecar import SidecarError


def test_an_outdated_copy_goes_when_its_last_engine_does(tmp_path):
    folder, model = tmp_path / "p", write_model(tmp_path / "replaced")
    with thread(folder), connect(folder) as sidecar:

        def held() -> list[tuple[bool, int]]:
            models = [m for m in sidecar.status()["models"] if m["path"] == str(model)]
            return [(m["outdated"], len(m["clients"])) for m in models]

        with link(folder, model, sidecar="auto") as (old, _, _):
            assert old.weights(lambda done, total: None) is not None
            damage(model)
            with link(folder, model, sidecar="auto") as (new, _, _):
                assert new.weights(lambda done, total: None) is not None
                assert held() == [(True, 1), (False, 1)]
            until(lambda: held() == [(True, 1), (False, 0)])
        until(lambda: held() == [(False, 0)])


def test_an_outdated_copy_whose_engine_ends_first_goes_when_the_new_one_is_ready(tmp_path):
    model = write_model(tmp_path / "replaced")
    with thread(tmp_path / "p") as owner, connect(tmp_path / "p") as sidecar:
        load(sidecar, model, tensor_parallel=2)
        gate = threading.Event()
        with link(tmp_path / "p", model, tensor_parallel=2) as (old, _, _):
            assert old.weights(lambda done, total: None) is not None
            damage(model)
            owner.holdings._loader.submit(gate.wait)
            sidecar.load(str(model), "float32", 1)
        until(lambda: not any(m["clients"] for m in sidecar.status()["models"]))
        assert [m["outdated"] for m in sidecar.status()["models"]] == [True, False], "it is all there is so far"
        gate.set()
        until(lambda: [(m["outdated"], m["state"]) for m in sidecar.status()["models"]] == [(False, "ready")])


def test_idle_kv_pools_make_way_for_weights(tmp_path, monkeypatch, caplog):
    with thread(tmp_path / "p") as owner, connect(tmp_path / "p") as sidecar:
        with connect(tmp_path / "p") as other:
            for fd in (*sidecar.pool("used", 1, 1), *other.pool("idle", 1, 1)):
                os.close(fd)
        until(lambda: [p["client"] for p in sidecar.status()["pools"]].count(None) == 1)
        free = lambda self: 0 if "idle" in owner.holdings.pools else 1 << 30  # noqa: E731
        monkeypatch.setattr("jaxserve.sidecar.backends.CpuBackend.free", free)
        with caplog.at_level(logging.INFO, "jaxserve"):
            load(sidecar, FIXTURES / "llama3")
        assert [p["identity"] for p in sidecar.status()["pools"]] == ["used"]
        assert "pool:idle makes way" in caplog.text


def test_a_model_goes_by_the_name_that_it_was_asked_by_and_by_its_path(tmp_path):
    from jaxserve.sidecar.holdings import asked_name, default_name

    assert asked_name("smollm2-135m") == "smollm2-135m"
    assert default_name("/models/llama-3.1-8b") == "llama-3.1-8b"
    assert default_name("/models/llama-3.1-8b.gguf") == "llama-3.1-8b"
    folder, model = tmp_path / "p", write_model(tmp_path / "v1.5-stored")
    with thread(folder), connect(folder) as sidecar:
        load(sidecar, model)
        for name in ("v1.5-stored", str(model), "my-model"):
            sidecar.load(str(model), "float32", 1, "target", "my-model")
            assert "  v1.5-stored, also my-model (target" in command._shown(sidecar.status())
            assert sidecar.verify(name) == []
            assert sidecar.evict(name) > 0
            load(sidecar, model)
        load(sidecar, model, role="draft")
        with pytest.raises(SidecarError, match=r"say which of v1.5-stored, v1.5-stored#2"):
            sidecar.evict(str(model))
        for name in ("v1.5-stored", "v1.5-stored#2"):
            assert sidecar.evict(name) > 0


def test_a_load_that_fails_is_told_by_its_path(capsys):
    offer = {"id": "m1", "state": "failed", "done": 0, "total": 0}
    sidecar = SimpleNamespace(offers=lambda: [offer], status=lambda: {"models": [{**offer, "error": "no room"}]})
    assert command._await(sidecar, {"m1": "/models/big"}, 1.0, None) == 1
    assert capsys.readouterr().out == "/models/big: no room\n"
