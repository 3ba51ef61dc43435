import shlex

import pytest

from jaxcomm.launch import options
from jaxcomm.launch.options import Options


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


@pytest.mark.parametrize(
    ("words", "parsed"),
    [
        # What follows the script belongs to it.
        ("-n 4 train.py -n 5 --timeout x -- -m --help",
         Options(4, "train.py", ("-n", "5", "--timeout", "x", "--", "-m", "--help"))),
        ("-n 4 --elastic train.py", Options(4, "train.py", elastic=True)),
        ("-n 4 --elastic --min-processes 2 train.py",
         Options(4, "train.py", elastic=True, min_processes=2)),
        ("-n 4 --elastic --hosts 2 --host 1 --coordinator a:12 --secret s train.py",
         Options(4, "train.py", elastic=True, hosts=2, host=1, coordinator="a:12",
                 secret="s")),
        ("-n 2 --watch train.py", Options(2, "train.py", watch=True)),
        ("-n 2 --watch --watch-timeout 9 train.py",
         Options(2, "train.py", watch=True, watch_timeout=9.0)),
        ("-n2 -m json.tool -m x", Options(2, "json.tool", ("-m", "x"), module=True)),
        ("--processes=3 --devices-per-process 2 --platform cuda --no-prefix "
         "--coordinator-port 123 --timeout 99.5 --grace 2 --max-restarts 7 "
         "-- train.py --",
         Options(3, "train.py", ("--",), devices_per_process=2, platform="cuda",
                 coordinator_port=123, prefix=False, timeout=99.5, grace=2.0,
                 max_restarts=7)),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("script")
def test_options_are_read(words, parsed):
    assert options.parse(shlex.split(words)) == parsed


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("", "-n/--processes"),
        ("train.py -n 2", "-n/--processes"),
        ("-n 2", "no script was given"),
        ("-n 2 -m", "no script was given"),
        ("-n", "expected one argument"),
        ("-n 0 train.py", "'0' is not a number from 1 to 256"),
        ("-n two train.py", "'two' is not a number from 1 to 256"),
        ("-n 2 --devices-per-process 0 train.py", "'0' is not a number from 1"),
        ("-n 2 --coordinator-port 65536 train.py", "from 0 to 65535"),
        ("-n 2 --timeout 0 train.py", "'0' is not a positive number of seconds"),
        ("-n 2 --grace nan train.py", "'nan' is not a positive number of seconds"),
        ("-n 2 --max-restarts -1 train.py", "'-1' is not a number from 0 to 10000"),
        ("-n 2 --device 2 train.py", "unrecognized arguments: --device"),
        ("-n 2 --min-processes 1 train.py", "--min-processes goes with --elastic"),
        ("-n 2 --elastic --min-processes 3 train.py", "there are 2 processes"),
        ("-n 2 --hosts 2 train.py", "--hosts goes with --elastic"),
        ("-n 2 --host 1 train.py", "--host, --coordinator and --secret go with"),
        ("-n 2 --elastic --hosts 2 --host 2 train.py", "numbers 0 to 1"),
        ("-n 2 --elastic --hosts 2 train.py", "--coordinator: give HOST:PORT"),
        ("-n 2 --elastic --hosts 2 --coordinator a:12 --secret s "
         "--coordinator-port 13 train.py", "With --hosts, the port is that of --coord"),
        ("-n 2 --watch-timeout 9 train.py", "--watch-timeout goes with --watch"),
        ("-n 2 --elastic --hosts 2 --coordinator a:12 train.py", "--secret: name a"),
        ("-n 2 absent.py", "there is no file 'absent.py'"),
        ("-n 2 -m no_such_package.x", "there is no module 'no_such_package'"),
        ("-n 2 -m ..x", "there is no module ''"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("script")
def test_a_bad_command_line_ends_with_2_and_advice(words, advice, capsys):
    with pytest.raises(SystemExit) as raised:
        options.parse(shlex.split(words))
    assert raised.value.code == 2
    assert advice in capsys.readouterr().err


def test_help_ends_with_0(capsys):
    with pytest.raises(SystemExit) as raised:
        options.parse(["--help"])
    assert raised.value.code == 0
    assert "--devices-per-process" in capsys.readouterr().out


@pytest.mark.usefixtures("script")
def test_another_system_than_linux_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(options.sys, "platform", "darwin")
    with pytest.raises(SystemExit) as raised:
        options.parse(["-n", "2", "train.py"])
    assert raised.value.code == 2
    said = capsys.readouterr().err
    assert "calls of Linux, and this is darwin. Start each process by hand" in said
