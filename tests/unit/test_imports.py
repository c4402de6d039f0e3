"""The rules for imports in docs/architecture.md, as code: services meet only in `shared`, and each
part imports only its own libraries."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import pages

ROOT = Path(__file__).parents[2]
OURS = {"hone", "shared", "services", "deploy"}
WIRE = {"pydantic", "pydantic_core", "fastapi", "starlette", "httpx2"}
ALLOWED: dict[str, set[str]] = {
    "shared": WIRE
    | {"msgpack", "prometheus_client", "structlog", "uvicorn", "xxhash"}
    | {"numpy", "zstandard"}  # in delta.py, which only trainer and sampler import
    | {"opentelemetry"}  # in tracing.py, only where a collector is named
    | {"jinja2", "tokenizers"},  # in templates.py, for orchestrator and `hone init`
    "hone": WIRE
    | {"tomli_w", "typer", "rich", "yaml"}
    | {"IPython", "matplotlib", "pandas"},  # in trainer/, where the user has them
    "services/orchestrator": WIRE
    | {"aiohttp", "datasets", "huggingface_hub", "jinja2", "pyarrow", "redis", "tokenizers"}
    | {"mcp", "wandb", "xxhash", "yarl"}
    | {"mlflow", "tensorboard", "trackio"}  # in trackers.py, where the extra is installed
    | {"reasoning_gym"}  # in generated.py, where the extra is installed
    | {"google", "numpy", "zstandard"},  # in tinker/, for protobuf's messages
    "services/rollout": WIRE
    | {"numpy", "vllm", "torch", "transformers", "safetensors", "prometheus_client", "uvicorn"},
    "services/trainer": WIRE
    | {
        "numpy",
        "deepspeed",
        "peft",
        "torch",
        "transformers",
        "safetensors",
        "uvicorn",
        "prometheus_client",
    },
    "services/reward": WIRE
    | {"latex2sympy2_extended", "math_verify", "modal", "nltk", "openai", "prometheus_client"}
    | {"rapidfuzz", "regex", "sympy"}
    | {"reasoning_gym"},  # in a worker, where the extra is installed
}


def modules(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_only_what_it_may(part: str) -> None:
    mine = part.replace("/", ".")
    for file in (ROOT / part).rglob("*.py"):
        for module in modules(file):
            top = module.partition(".")[0]
            if top in OURS:
                meets = module == "shared" or module.startswith("shared.")
                own = module == mine or module.startswith(f"{mine}.")
                assert own or (meets and part != "shared"), (
                    f"{file.relative_to(ROOT)} imports {module}"
                )
            elif top not in sys.stdlib_module_names:
                assert top in ALLOWED[part], f"{file.relative_to(ROOT)} imports {module}"


def test_rooms_of_the_orchestrator_import_only_rooms_below() -> None:
    for file, room in pages.imports():
        own = file.relative_to(pages.ORCHESTRATOR).parts[0]
        assert pages.ROOMS.index(own) < pages.ROOMS.index(room), f"{file} imports {room}"


def test_a_module_that_is_named_in_a_string_exists() -> None:
    """`python -m`, a module imported by its name, and a class that vLLM loads."""
    named = re.compile(r"(?:services|shared|hone|deploy)(?:\.\w+)+")
    missing = []
    for part in ("services", "shared", "hone", "deploy", "bench"):
        for file in (ROOT / part).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                    continue
                name = node.value
                if named.fullmatch(name) and not name.endswith((".py", ".toml", ".lua")):
                    paths = [
                        ROOT / each.replace(".", "/") for each in (name, name.rpartition(".")[0])
                    ]
                    found = [
                        one for one in paths if one.is_dir() or one.with_suffix(".py").is_file()
                    ]
                    is_class = name.rpartition(".")[2][0].isupper()
                    missing += (
                        [] if paths[0] in found or (is_class and found) else [(file.name, name)]
                    )
    assert missing == []


def test_no_relative_imports() -> None:
    for part in OURS:
        for file in (ROOT / part).rglob("*.py"):
            levels = [
                node.level
                for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, ast.ImportFrom)
            ]
            assert not any(levels), file


def test_shared_imports_without_the_engines() -> None:
    code = (
        "import sys, shared.http.service, shared.http.client, shared.wire; "
        "print([m for m in ('torch', 'vllm', 'numpy', 'opentelemetry') if m in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ended.stdout.strip() == "[]"


def test_the_command_imports_no_server_and_no_library_of_a_services_own() -> None:
    """Else `hone --help` takes seconds. The time itself is a busy machine's as well."""
    others = set[str]().union(*ALLOWED.values()) - ALLOWED["hone"] | {"fastapi", "starlette"}
    allowed = {"structlog", "msgpack", "xxhash"}
    code = f"import sys, hone.cli; print(sorted({others - allowed} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ended.stdout.strip() == "[]"


def test_a_command_that_only_asks_imports_no_more_than_it_needs() -> None:
    """Else each one takes seconds of processor time. The time itself is a busy machine's as well.
    What fails to connect has imported all but what shows an answer."""
    unused = {"structlog", "pygments", "rich.progress", "certifi", "fastapi", "uvicorn"}
    unused |= {
        "shared.http.operations",
        "shared.http.service",
        "shared.plan",
    }
    unused |= {"shared.wire.training", "shared.wire.rollouts", "shared.wire.openai"}
    unused |= {"shared.job.job", "pydantic_settings"}
    unused |= {"hone.commands.doctor", "hone.commands.init", "hone.long_calls"}
    code = (
        "import sys, hone.cli\nsys.argv = ['hone', *sys.argv[1:]]\n"
        f"try: hone.cli.main()\nfinally: print(sorted({unused} & set(sys.modules)))"
    )
    nowhere = {"HONE_ORCHESTRATOR_URL": "http://127.0.0.1:9"}
    for line in ("ls", "ls x", "logs x", "metrics x", "cancel x", "resume --all"):
        ended = subprocess.run(
            [sys.executable, "-c", code, *line.split()],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, **nowhere},
        )
        assert ended.returncode == 2 and "cannot reach" in ended.stderr, ended.stderr
        assert ended.stdout.strip() == "[]", line


def test_the_help_of_the_command_imports_no_models_and_no_commands() -> None:
    code = (
        "import sys, hone.cli\nsys.argv = ['hone', '--help']\n"
        "try: hone.cli.main()\n"
        "finally: print([m for m in sys.modules if m in ('pydantic', 'httpx2')"
        " or m.startswith('hone.commands.')])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ended.stdout.strip().endswith("[]")
