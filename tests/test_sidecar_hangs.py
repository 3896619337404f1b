"""Owners that live and cannot be talked to: without a socket, or stopped; and how people get rid of them."""

import os
import signal
import time

import pytest
from sidecars import connect, link, process, running, thread, until
from tiny import FIXTURES

from jaxserve import cli
from jaxserve.sidecar import SidecarError, client, owner, place
from jaxserve.sidecar.place import Place


def command(capsys, folder, *words: str) -> tuple[int, str]:
    status = cli.main(["sidecar", words[0], "--sidecar-dir", str(folder), *words[1:]])
    return status, "".join(capsys.readouterr())


@pytest.mark.parametrize("kinds", [["sock"], ["lock"], ["sock", "lock"]])
def test_a_socket_that_was_cleaned_away_is_made_again(tmp_path, monkeypatch, kinds):
    monkeypatch.setattr(owner, "SOCKET_SECONDS", 0.1)
    with thread(tmp_path / "p") as made, connect(tmp_path / "p") as early:
        for kind in kinds:
            (tmp_path / "p" / f"sidecar-cpu.{kind}").unlink()
        until(lambda: made.place.visible() and made.place.holder())
        with connect(tmp_path / "p") as late:
            assert late.pid == early.status()["pid"] == made.place.holder()
        assert made.place.lock() is None, "the lock is held as before"


def test_an_owner_that_another_has_replaced_leaves_its_socket_alone(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(owner, "SOCKET_SECONDS", 0.1)
    with thread(tmp_path / "p") as made:
        monkeypatch.setattr(made.place, "holder", lambda: 1)
        made.place.forget()
        until(lambda: "another sidecar has taken its place" in caplog.text)
        assert not made.place.visible()


def test_a_living_owner_without_a_socket_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(place, "PATIENCE_SECONDS", 0.2)
    with process(tmp_path / "p") as sidecar:
        os.kill(sidecar.pid, signal.SIGSTOP)
        (tmp_path / "p" / "sidecar-cpu.sock").unlink()
        for words in (["status"], ["stop"], ["start"]):
            begun = time.monotonic()
            status, text = command(capsys, tmp_path / "p", *words)
            assert (status, f"process {sidecar.pid} holds the lock" in text) == (1, True), text
            assert time.monotonic() - begun < 5


def test_an_owner_that_hangs_is_named_soon_and_can_be_killed(tmp_path, monkeypatch, capsys):
    assert client.HELLO_SECONDS <= 5
    monkeypatch.setattr(client, "HELLO_SECONDS", 0.3)
    folder = tmp_path / "p"
    with process(folder) as sidecar:
        os.kill(sidecar.pid, signal.SIGSTOP)
        for words in (["status"], ["status", "--wait", "60"], ["stop"], ["start"]):
            begun = time.monotonic()
            status, text = command(capsys, folder, *words)
            assert (status, f"process {sidecar.pid}, does not answer" in text) == (1, True), text
            assert time.monotonic() - begun < 5
        begun = time.monotonic()
        with link(folder, FIXTURES / "llama3", sidecar="auto", sidecar_fallback="disk") as (made, _, _):
            assert made.weights(lambda done, total: None) is None
        assert time.monotonic() - begun < 5
        assert command(capsys, folder, "stop", "--kill") == (0, f"sidecar cpu: process {sidecar.pid} was killed\n")
        until(lambda: not running(sidecar.pid))
        status, text = command(capsys, folder, "stop", "--kill")
        assert (status, f"no sidecar runs in {folder}" in text) == (1, True)


def test_a_process_that_has_the_number_of_a_dead_owner_is_not_killed(tmp_path):
    with Place(tmp_path / "p", "cpu", create=True) as found:
        for text in (f"{os.getpid()} 1", f"{os.getpid()}", f"-1 {os.getpid()}", "1 1", "x y", ""):
            (tmp_path / "p" / "sidecar-cpu.lock").write_text(text)
            assert found.holder() is None
            with pytest.raises(SidecarError, match="no living process"):
                found.kill()


def test_messages_say_where_it_looked_and_who_has_died(tmp_path, capsys):
    folder = tmp_path / "p"
    for word in ("status", "stop"):
        assert f"no sidecar runs in {folder}, which does not exist" in command(capsys, folder, word)[1]
    with process(folder) as sidecar:
        os.kill(sidecar.pid, signal.SIGKILL)
        until(lambda: not running(sidecar.pid))
        for word in ("status", "stop"):
            status, text = command(capsys, folder, word)
            assert (status, "it has died" in text) == (1, True), text


@pytest.mark.parametrize(
    "words", [("start", "--timeout", "-1"), ("start", "--timeout", "nan"), ("status", "--wait", "-1")]
)
def test_seconds_that_are_none_are_refused(tmp_path, capsys, words):
    status, text = command(capsys, tmp_path / "p", *words)
    assert (status, "must be seconds" in text) == (2, True), text
    assert not (tmp_path / "p").exists()
