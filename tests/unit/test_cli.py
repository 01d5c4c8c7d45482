import json
import os
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner, Result

from ascend_opt.cli import main
from ascend_opt.conditions import installed_version
from ascend_opt.config import ENVIRONMENT

BUILT_IN = {"sync-elision", "mlp-prefetch", "uva-staging"}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def test_list_passes_json_has_the_promised_keys() -> None:
    """`list-passes --json` is a list of objects that scripts can rely on."""
    entries = json.loads(invoke("list-passes", "--json").stdout)
    assert {entry["name"] for entry in entries} >= BUILT_IN
    promised = {
        "name",
        "state",
        "reason",
        "summary",
        "origin",
        "conditions",
        "parameters",
        "version",
        "distribution",
    }
    assert all(promised <= set(entry) for entry in entries)


def test_a_pass_that_nobody_asked_for_is_off() -> None:
    """`list-passes` never calls a pass on that is merely installed."""
    entries = json.loads(invoke("list-passes", "--json").stdout)
    assert {entry["state"] for entry in entries} == {"off"}


def test_list_passes_sees_what_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With VLLM_ASCEND_OPT set, the state is the one that a vLLM process would begin with."""
    monkeypatch.setenv(ENVIRONMENT, '{"passes": {"sync-elision": {}}}')
    entries = json.loads(invoke("list-passes", "--json").stdout)
    states = {entry["name"]: entry["state"] for entry in entries}
    assert states["sync-elision"] != "off"
    assert states["mlp-prefetch"] == "off"


def test_list_passes_imports_neither_torch_nor_vllm() -> None:
    """`list-passes` reads metadata and source files only."""
    code = (
        "import sys; from ascend_opt.cli import main; main(['list-passes'], standalone_mode=False);"
        "sys.exit(', '.join({'torch', 'vllm', 'vllm_ascend'} & set(sys.modules)) or 0)"
    )
    found = python("-c", code)
    assert (found.returncode, found.stderr) == (0, "")


def test_the_environment_is_checked_before_anything_is_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong VLLM_ASCEND_OPT is named, with exit code 2, and not taken for 'off'."""
    monkeypatch.setenv(ENVIRONMENT, "no-such-file.yaml")
    result = invoke("list-passes")
    assert result.exit_code == 2
    assert "no-such-file.yaml" in result.stderr


@pytest.mark.parametrize("command", ["explain", "run --enable"])
def test_an_unknown_pass_gets_the_nearest_name(command: str) -> None:
    """A misspelt pass is a usage error that suggests the right one."""
    result = invoke(*command.split(), "sync-elison", *(["--", "true"] if "run" in command else []))
    assert result.exit_code == 2
    assert "did you mean 'sync-elision'?" in result.stderr


def test_explain_json_names_every_condition_and_target() -> None:
    """`explain --json` has one finding for each condition and one report for each target."""
    found = json.loads(invoke("explain", "sync-elision", "--json").stdout)
    assert "no-speculator" in {finding["name"] for finding in found["findings"]}
    assert all(":" in target["target"] for target in found["targets"])
    assert found["remove_when"]


def test_doctor_fails_when_vllm_plugins_filters_us_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM_PLUGINS without ascend_opt switches every pass off silently; doctor says so."""
    monkeypatch.setenv("VLLM_PLUGINS", "ascend")
    result = invoke("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(result.stdout)}
    assert result.exit_code == 1
    assert checks["VLLM_PLUGINS"]["outcome"] == "fail"
    assert checks["VLLM_PLUGINS"]["advice"] == "VLLM_PLUGINS=ascend,ascend_opt"


@pytest.mark.parametrize("value", ["ascend,ascend_opt", "ascend_opt"])
def test_doctor_accepts_a_filter_that_lets_us_in(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """VLLM_PLUGINS that lists ascend_opt is fine."""
    monkeypatch.setenv("VLLM_PLUGINS", value)
    checks = {c["name"]: c for c in json.loads(invoke("doctor", "--json").stdout)}
    assert checks["VLLM_PLUGINS"]["outcome"] == "ok"


def test_run_passes_the_command_without_a_shell() -> None:
    """Arguments reach the command as they are, quotes and semicolons included."""
    code = "import sys; print(sys.argv[1:])"
    found = python(
        *("-m", "ascend_opt", "run", "--config", "/dev/stdin", "--"),
        *(sys.executable, "-c", code, "a b; $HOME", "--json"),
    )
    assert found.returncode == 2  # an empty configuration is an error, not "nothing to do"
    path = "configs-for-test.yaml"
    with CliRunner().isolated_filesystem():
        with open(path, "w") as file:
            file.write("passes: {mlp-prefetch: {backend: record}}\n")
        found = python(
            *("-m", "ascend_opt", "run", "--config", path, "--"),
            *(sys.executable, "-c", code, "a b; $HOME", "--json"),
        )
    assert found.stdout == "['a b; $HOME', '--json']\n"


def test_run_hands_the_configuration_to_the_command() -> None:
    """The command finds everything in VLLM_ASCEND_OPT, parameters resolved."""
    with CliRunner().isolated_filesystem():
        with open("one.yaml", "w") as file:
            file.write("passes: {mlp-prefetch: {backend: record, down_bytes: 1KiB}}\n")
        found = python(
            *("-m", "ascend_opt", "run", "--config", "one.yaml", "--"),
            *(sys.executable, "-c", f"import os; print(os.environ['{ENVIRONMENT}'])"),
        )
    assert json.loads(found.stdout)["passes"]["mlp-prefetch"]["down_bytes"] == 1024


def test_run_refuses_a_pass_that_cannot_be_on_here() -> None:
    """What the user named and cannot have is an error with the reason, before the command runs."""
    if installed_version("vllm-ascend") is not None:
        pytest.skip("vllm-ascend is installed here")
    result = invoke("run", "--enable", "sync-elision", "--", "true")
    assert result.exit_code == 1
    assert "vllm-ascend is not installed" in result.stderr


def test_run_refuses_while_vllm_plugins_filters_us_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` does not start a server on which no pass would be on."""
    monkeypatch.setenv("VLLM_PLUGINS", "ascend")
    result = invoke("run", "--enable", "mlp-prefetch:backend=record", "--", "true")
    assert result.exit_code == 2
    assert "VLLM_PLUGINS" in result.stderr


def test_run_obeys_the_kill_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`VLLM_ASCEND_OPT=off` is not overridden by accident."""
    monkeypatch.setenv(ENVIRONMENT, "off")
    result = invoke("run", "--enable", "mlp-prefetch:backend=record", "--", "true")
    assert result.exit_code == 2
    assert "off" in result.stderr


def test_run_names_a_command_that_is_not_there() -> None:
    """A command that cannot be started is named."""
    with CliRunner().isolated_filesystem():
        with open("one.yaml", "w") as file:
            file.write("passes: {}\n")
        result = invoke("run", "--config", "one.yaml", "--", "no-such-command")
    assert result.exit_code == 2
    assert "no-such-command" in result.stderr


def test_config_check_names_line_and_column() -> None:
    """A wrong configuration exits 1 with file, line and column."""
    with CliRunner().isolated_filesystem():
        with open("bad.yaml", "w") as file:
            file.write("passes:\n  mlp-prefetch:\n    max_num_token: 3\n")
        result = invoke("config", "check", "bad.yaml")
        as_json = json.loads(invoke("config", "check", "bad.yaml", "--json").stdout)
    assert result.exit_code == 1
    assert "bad.yaml:3:5: " in result.stderr
    assert "did you mean 'max_num_tokens'?" in result.stderr
    assert as_json["valid"] is False
    assert "bad.yaml:3:5" in as_json["error"]


def test_config_schema_accepts_the_shipped_configurations() -> None:
    """Every file in configs/ follows the schema that `config schema` prints."""
    import jsonschema
    import yaml

    schema = json.loads(invoke("config", "schema").stdout)
    directory = os.path.join(os.path.dirname(__file__), "..", "..", "configs")
    names = [name for name in os.listdir(directory) if name.endswith(".yaml")]
    assert names
    for name in names:
        with open(os.path.join(directory, name)) as file:
            jsonschema.validate(yaml.safe_load(file), schema)


def test_status_without_processes_says_so(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record, no table: a sentence for people and an empty list for scripts."""
    monkeypatch.setenv("VLLM_ASCEND_OPT_RUN_DIR", str(tmp_path))
    assert "No live process" in invoke("status").stdout
    assert json.loads(invoke("status", "--json").stdout) == []


def test_status_reads_the_record_of_a_live_process(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that enabled a pass shows up with its pid, role and state while it lives."""
    monkeypatch.setenv("VLLM_ASCEND_OPT_RUN_DIR", str(tmp_path))
    code = (
        "import ascend_opt, sys, time\n"
        "try: ascend_opt.load_config({'passes': {'mlp-prefetch': {'backend': 'record'}}})\n"
        "finally: print('ready', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    found: list[dict[str, object]] = []
    until = time.monotonic() + 30
    while not found and time.monotonic() < until:
        found = json.loads(invoke("status", "--json").stdout)
    child.communicate("")
    assert [record["pid"] for record in found] == [child.pid]
    assert found[0]["role"] == "main"
    assert json.loads(invoke("status", "--json").stdout) == []
