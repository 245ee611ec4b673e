"""The entry point: help, exit codes, one-line errors."""

import subprocess
import sys

import pytest

from mindspeed_kda.cli import common, main


def test_help_teaches(capsys):
    assert main.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in main.COMMANDS:
        assert name in text
    assert "mindspeed-kda demo" in text


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["doctor", "--nonsense"], ["--nonsense"]])
def test_wrong_usage_exits_2(argv, capsys):
    assert main.main(argv) == 2
    assert "error:" in capsys.readouterr().err


@pytest.fixture
def doctor_raises(monkeypatch):
    """Makes the command ``doctor`` raise the error that it is given."""

    def install(error):
        class Module:
            @staticmethod
            def add_parser(subparsers):
                subparsers.add_parser("doctor")

            @staticmethod
            def run(args):
                raise error

        monkeypatch.setattr(main, "_module", lambda name: Module)

    return install


def test_a_known_error_is_one_line_and_exit_2(doctor_raises, capsys):
    doctor_raises(common.UsageError("--text: cannot read x: no such file"))
    assert main.main(["doctor"]) == 2
    assert capsys.readouterr().err == "mindspeed-kda: error: --text: cannot read x: no such file\n"


def test_an_unknown_error_keeps_its_traceback(doctor_raises):
    doctor_raises(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main.main(["doctor"])


def test_an_interrupt_is_one_line(doctor_raises, capsys):
    doctor_raises(KeyboardInterrupt())
    assert main.main(["doctor"]) == 130
    assert capsys.readouterr().err == "mindspeed-kda: interrupted\n"


def test_as_a_process():
    done = subprocess.run([sys.executable, "-m", "mindspeed_kda", "bogus"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "invalid choice: 'bogus'" in done.stderr


def test_only_the_named_command_is_imported():
    code = (
        "import sys; from mindspeed_kda.cli.main import main; code = main(['doctor', '--help']);"
        "heavy = {'matplotlib', 'rich', 'triton', 'torch_npu', 'mindspeed_kda.cli.demo', 'mindspeed_kda.cli.bench'};"
        "print('LOADED', sorted(heavy & set(sys.modules)), code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "LOADED [] 0" in done.stdout, done.stdout + done.stderr


def test_table_aligns_words_left_and_figures_right():
    text = common.table(("name", "us"), [("a", "1.5"), ("long", "100")])
    assert text.splitlines() == ["name   us", "----  ---", "a     1.5", "long  100"]
