"""Every command and every example of the README and of docs/ is run, or at least parsed.

CONTRIBUTING.md states the convention for a page's fences.
"""

import ast
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from detlogp import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "bash", "text", "json"}
TITLES = {"", "on a GPU", "slow"}
# Other programs, which are not run: a GPU, a network or a build would be needed.
NOT_RUN = {"cuobjdump", "git", "ncu", "nsys", "nvcc", "nvidia-smi", "pytest"}
FIRST_WORDS = {"detlogp", "python", "make", "pip", *NOT_RUN}
# The claim of a print in an example: print(torch.equal(one, other))   # True
PRINTED = re.compile(r"#\s*((?:True|False)(?: (?:True|False))*)\s*$")

pytestmark = [
    # Of torch's own compiler and of linearize, about their own code.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*get_attr Node:UserWarning"),
    # Of TRL, about transformers' names.
    pytest.mark.filterwarnings("ignore:.* will be removed in v6:FutureWarning"),
]


class Block(NamedTuple):
    """A fenced block, or an indented line that is a command."""

    line: int  # of its first line of text
    language: str
    title: str
    body: str


class Command(NamedTuple):
    line: int
    words: list[str]
    exit_code: int
    title: str  # of its block: with one, it is only parsed


def blocks(text: str) -> Iterator[Block]:
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        fence = re.fullmatch(r"( *)```(.*)", line)
        indented = re.fullmatch(r" {4}((\S+).*)", line)
        if fence is None:
            if indented is not None and indented[2] in FIRST_WORDS:
                yield Block(number, "bash", "", indented[1])
            continue
        info = re.fullmatch(r'(\w+)(?: title="([^"]*)")?', fence[2])
        assert info is not None, f"line {number}: a fence needs a language, got {line!r}"
        language, title = info[1], info[2] or ""
        assert language in LANGUAGES, f"line {number}: language {language!r}"
        assert title in TITLES, f"line {number}: title {title!r}"
        body = []
        for _, inside in lines:
            if inside.strip() == "```":
                break
            body.append(inside.removeprefix(fence[1]))
        else:
            raise AssertionError(f"line {number}: the fence is not closed")
        yield Block(number + 1, language, title, "\n".join(body))


def commands(block: Block) -> Iterator[Command]:
    """A command a line; a backslash at the end continues it."""
    number = block.line
    for text in re.split(r"(?<!\\)\n", block.body):
        words = shlex.split(text.replace("\\\n", " "), comments=True)
        expected = re.search(r"# exit (\d+)\s*$", text)
        if words:
            yield Command(number, words, int(expected[1]) if expected else 0, block.title)
        number += text.count("\n") + 1


def run_examples(text: str, page: str) -> None:
    """Runs a page's Python blocks in order, in one namespace."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(text):
        if block.language != "python":
            continue
        lines = block.body.splitlines()
        for statement in ast.parse(block.body).body:
            claim = PRINTED.search(lines[(statement.end_lineno or 0) - 1])
            ast.increment_lineno(statement, block.line - 1)
            module = ast.Module([statement], [])
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(module, page, "exec"), namespace)
            where = f"{page}, line {statement.lineno}"
            assert claim is None or printed.getvalue().strip() == claim[1], where


def parse(words: list[str], where: str) -> None:
    """The command line of `detlogp` has these options."""
    said, code = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            cli._parser().parse_args(words[1:])
    except SystemExit as stop:
        code = stop.code
    assert not code, f"{where}: {shlex.join(words)}\n{said.getvalue()}"


def execute(command: Command, folder: Path, where: str) -> None:
    words = command.words
    argv = [sys.executable, *(["-m", *words] if words[0] == "detlogp" else words[1:])]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if command.title != "on a GPU":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    text = f"{where}: {shlex.join(words)} gave {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode == command.exit_code, text


def check_pip(words: list[str], where: str) -> None:
    """The extras and the build settings that are named exist."""
    project = (ROOT / "pyproject.toml").read_text()
    optional = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    known = re.findall(r"^(\w+) =", optional, re.MULTILINE)
    cmake = (ROOT / "CMakeLists.txt").read_text()
    for word in words:
        if (extras := re.search(r"\[(.+)\]$", word)) is not None:
            unknown = set(extras[1].split(",")) - set(known)
            assert not unknown, f"{where}: unknown extras {unknown}"
        if (setting := re.search(r"cmake\.define\.(\w+)=", word)) is not None:
            assert f"set({setting[1]} " in cmake, f"{where}: unknown setting {setting[1]}"


def check_command(command: Command, folder: Path, page: str) -> None:
    words, where = command.words, f"{page}, line {command.line}"
    assert words[0] in FIRST_WORDS, f"{where}: unknown command {words[0]}"
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        unknown = {word for word in words[1:] if "=" not in word} - set(targets)
        assert not unknown, f"{where}: no such target: {unknown}"
    if words[0] == "pip":
        check_pip(words, where)
    if words[0] == "detlogp":
        parse(words, where)
    if words[0] == "python" and command.title:
        assert (ROOT / words[1]).is_file(), f"{where}: no file {words[1]}"
    if words[0] in ("detlogp", "python") and not command.title:
        execute(command, folder, where)


def check_commands(text: str, folder: Path, page: str) -> None:
    for block in blocks(text):
        if block.language == "bash":
            for command in commands(block):
                check_command(command, folder, page)
        if block.language == "text":
            # Output, and the command above it.
            for words in (shlex.split(text) for text in re.findall(r"^\$ (.*)", block.body, re.M)):
                if words[0] == "detlogp":
                    parse(words, f"{page}, line {block.line}")
        if block.language == "json":
            for line in block.body.splitlines():
                json.loads(line)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder with the repository's examples, as the current one."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    torch._dynamo.reset()
    yield tmp_path
    torch._dynamo.reset()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples(page: Path, folder: Path) -> None:
    run_examples(page.read_text(), page.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands(page: Path, folder: Path) -> None:
    check_commands(page.read_text(), folder, page.name)


@pytest.mark.cuda
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_a_gpu(page: Path, folder: Path) -> None:
    """Those that the other test only parses, made quick: a whole validation takes minutes."""
    for block in blocks(page.read_text()):
        if block.language != "bash" or block.title != "on a GPU":
            continue
        for command in commands(block):
            words = list(command.words)
            if words[0] != "detlogp":
                continue
            if words[1] in ("validate", "bench") and "--verify" not in words:
                words.append("--quick")
            execute(command._replace(words=words), folder, f"{page.name}, line {command.line}")


def test_what_the_readme_holds() -> None:
    """Its fenced example and its indented commands are found."""
    found = list(blocks((ROOT / "README.md").read_text()))
    assert [block.language for block in found].count("python") >= 1
    assert {"make demo", "make test"} <= {
        " ".join(command.words)
        for block in found
        if block.language == "bash"
        for command in commands(block)
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```bash\ndetlogp info --yaml\n```", "unrecognized arguments: --yaml"),
        ('```bash title="on a GPU"\ndetlogp audit --slow\n```', "unrecognized arguments: --slow"),
        ('```bash title="slow"\npython examples/none.py\n```', "no file"),
        ("```text\n$ detlogp infos\n```", "invalid choice"),
        ("```bash\ndetlogp info  # exit 1\n```", "gave 0"),
        ("```bash\npython -c 'raise SystemExit(3)'\n```", "gave 3"),
        ("    make nothing", "no such target"),
        ("```bash\npip install '.[none]'\n```", "unknown extras"),
        ("```bash\npip install . -C cmake.define.NONE=1\n```", "unknown setting"),
        ("```bash\nrm -r build\n```", "unknown command rm"),
        ("```sh\nmake test\n```", "language 'sh'"),
        ("```\nmake test\n```", "needs a language"),
        ('```bash title="quick"\nmake test\n```', "title 'quick'"),
        ("```bash\nmake test\n", "not closed"),
    ],
)
def test_a_wrong_command_is_found(text: str, message: str, folder: Path) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        check_commands(text, folder, "page")


def test_a_wrong_example_is_found(folder: Path) -> None:
    with pytest.raises(AssertionError, match="page, line 5"):
        run_examples("```python\nx = 1\n```\n```python\nprint(x == 2)  # True\n```", "page")
    with pytest.raises(TypeError, match="unexpected keyword"):
        run_examples("```python\nimport detlogp\ndetlogp.logp(rows_of=1)\n```", "page")
