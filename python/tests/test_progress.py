import sys
import types

import pytest
from conftest import needs

import simplicit
from simplicit import _progress


def test_silent_where_nobody_can_see(capsys):
    shown = _progress.watcher(None)
    shown("rows", 1, 2)
    shown.close()
    assert isinstance(shown, _progress.Nothing) and capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(capsys):
    shown = _progress.watcher("bar")
    shown("rows of fc1", 12, 24)
    shown.close()
    drawn = capsys.readouterr().err
    assert "rows of fc1" in drawn and drawn.count("█") == drawn.count("░") == 12
    assert drawn.endswith("\r\x1b[K")


def test_an_element_in_a_notebook(monkeypatch):
    class ZMQInteractiveShell:
        pass

    updates = []
    handle = types.SimpleNamespace(update=updates.append)
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = ZMQInteractiveShell
    display = types.ModuleType("IPython.display")
    display.HTML, display.display = str, lambda *_, **__: handle
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(_progress, "has_tqdm", lambda: False)
    shown = _progress.watcher(None)
    assert isinstance(shown, _progress.Notebook)
    shown("rows of <fc1>", 3, 9)
    shown.close()
    assert updates[0].startswith('<progress value="3" max="9">') and "&lt;fc1&gt;" in updates[0]
    assert updates[-1] == ""


def test_tqdm_where_it_is_installed(monkeypatch, capsys):
    needs("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shown = _progress.watcher(None)
    assert isinstance(shown, _progress.Tqdm)
    shown("rows of fc1", 3, 12)
    shown("rows of fc1", 12, 12)
    shown("rows of fc2", 1, 4)
    shown.close()
    drawn = capsys.readouterr().err
    assert "rows of fc1" in drawn and "rows of fc2" in drawn
    monkeypatch.setattr(_progress, "has_tqdm", lambda: False)
    assert isinstance(_progress.watcher(None), _progress.Terminal)


def test_other_words_are_refused():
    with pytest.raises(simplicit.SettingError, match="progress: expected tqdm"):
        _progress.watcher("loud")
