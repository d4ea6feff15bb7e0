"""What is handed to schedulers: byte for byte what the golden files hold, and nothing that their schemas do not know.

Kubernetes' own parts are checked with its published schemas; for JobSet and Kubeflow the schema here is ours, of the fields that we use.
"""

from __future__ import annotations

import shutil
import subprocess
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from surefoot.core.errors import ConfigError
from surefoot.launch.kubernetes import KubernetesOptions, manifests
from surefoot.launch.slurm import SlurmOptions, sbatch_script
from surefoot.launch.submission import NEVER_AGAIN, Submission, header, parse_time_s

GOLDEN = Path(__file__).parent / "golden"
ASKED = Submission(
    name="quickstart",
    config="/shared/run.toml",
    run_dir="/shared/runs/quick start",
    num_nodes=4,
    version="0.1.0",
    made_by="surefoot submit slurm /shared/run.toml --nodes 4",
    overrides=("launch.nodes=2:4", "run.name=it's"),
    save_s=75.5,
    num_gpus=8,
    num_cpus=64,
    memory_bytes=512 << 30,
    denied=("n3", "n7"),
)
SLURM = SlurmOptions("24:00:00", "/shared/quickstart-%j.out", "long", "lab", ("--qos=high",))
KUBERNETES = KubernetesOptions("registry/surefoot:1", "shared", "/shared", "training", "64Gi")

JOBSET_SPEC: dict[str, Any] = {
    "type": "object", "additionalProperties": False, "required": ["replicatedJobs"],
    "properties": {
        "failurePolicy": {
            "type": "object", "additionalProperties": False,
            "properties": {
                "maxRestarts": {"type": "integer", "minimum": 0},
                "rules": {"type": "array", "items": {
                    "type": "object", "additionalProperties": False, "required": ["name", "action"],
                    "properties": {
                        "name": {"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:-]{0,126}[A-Za-z0-9_])?$"},
                        "action": {"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
                        "onJobFailureReasons": {"type": "array", "items": {
                            "enum": ["BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "PodFailurePolicy"],
                        }},
                    },
                }},
            },
        },
        "replicatedJobs": {"type": "array", "minItems": 1, "items": {
            "type": "object", "additionalProperties": False, "required": ["name", "template"],
            "properties": {"name": {"type": "string"}, "replicas": {"type": "integer"}, "template": {
                "type": "object", "additionalProperties": False, "required": ["spec"],
                "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}},
            }},
        }},
    },
}  # fmt: skip
RUNTIME_SPEC: dict[str, Any] = {
    "type": "object", "additionalProperties": False, "required": ["template"],
    "properties": {
        "mlPolicy": {"type": "object", "additionalProperties": False, "properties": {"numNodes": {"type": "integer", "minimum": 1}}},
        "template": {"type": "object", "additionalProperties": False, "required": ["spec"], "properties": {"spec": JOBSET_SPEC}},
    },
}  # fmt: skip
TRAINJOB_SPEC: dict[str, Any] = {
    "type": "object", "additionalProperties": False, "required": ["runtimeRef"],
    "properties": {
        "runtimeRef": {
            "type": "object", "additionalProperties": False, "required": ["name"],
            "properties": {"apiGroup": {"const": "trainer.kubeflow.org"}, "kind": {"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]},
                           "name": {"type": "string"}},
        },
        "trainer": {
            "type": "object", "additionalProperties": False,
            "properties": {"image": {"type": "string"}, "numNodes": {"type": "integer"}, "resourcesPerNode": {"type": "object"},
                           "command": {"type": "array", "items": {"type": "string"}}},
        },
    },
}  # fmt: skip
SCHEMAS = {"JobSet": JOBSET_SPEC, "TrainingRuntime": RUNTIME_SPEC, "TrainJob": TRAINJOB_SPEC}


def yaml_of(kind: Any) -> str:
    made = manifests(ASKED, KUBERNETES, kind=kind)
    return "\n".join(header(ASKED)) + "\n" + str(yaml.safe_dump_all(made, sort_keys=False, width=1000))


def jobs_of(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The specs of batch/v1 Jobs within."""
    found = []
    for document in documents:
        spec = document["spec"].get("template", document)["spec"]
        found += [job["template"]["spec"] for job in spec.get("replicatedJobs", [])]
    return found


@pytest.mark.parametrize(
    ("name", "text"),
    [("slurm.sh", sbatch_script(ASKED, SLURM)), ("jobset.yaml", yaml_of("jobset")), ("trainjob.yaml", yaml_of("trainjob"))],
)
def test_the_same_request_makes_the_same_bytes(name: str, text: str) -> None:
    assert text == (GOLDEN / name).read_text()


def test_the_script_is_bash_that_parses() -> None:
    bash = shutil.which("bash")
    assert bash is not None
    for asked in (ASKED, Submission("a", "/a b/run.toml", "/a b/run", 1, "0", "surefoot submit slurm")):
        checked = subprocess.run([bash, "-n"], input=sbatch_script(asked, SLURM), capture_output=True, text=True, timeout=20, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")
    assert subprocess.run([bash, "-n"], input="if", capture_output=True, text=True, timeout=20, check=False).returncode != 0


def test_a_run_is_told_more_than_a_save_and_the_schedulers_minute_before_its_end() -> None:
    for save_s, grace_s in ((0.0, 60.0), (300.2, 60.0), (10.0, 90.0)):
        assert replace(ASKED, save_s=save_s, grace_s=grace_s).notice_s > max(save_s, grace_s) + 60


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_manifests_hold_nothing_that_their_schemas_do_not_know(kind: Any) -> None:
    documents = manifests(ASKED, KUBERNETES, kind=kind)
    for document in documents:
        assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
        jsonschema.validate(document["spec"], SCHEMAS[document["kind"]])
    (job,) = jobs_of(documents)
    validate_job(job)
    codes = [rule["onExitCodes"]["values"] for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    assert codes == [list(NEVER_AGAIN)]
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] > max(ASKED.grace_s, ASKED.save_s)


def test_the_schemas_see_a_misspelt_field() -> None:
    (document,) = manifests(ASKED, KUBERNETES, kind="jobset")
    (job,) = jobs_of([document])
    document["spec"]["failurePolicy"]["maxRestart"] = 3
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document["spec"], JOBSET_SPEC)
    job["template"]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(Exception, match="terminationGracePeriod"):
        validate_job(job)


def validate_job(spec: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries of the validator
        import kubernetes_validate

        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["", "Run", "a_b", "-a", "a" * 41])
def test_a_name_that_kubernetes_does_not_take_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no name for Kubernetes"):
        manifests(replace(ASKED, name=name), KUBERNETES, kind="jobset")


@pytest.mark.parametrize(
    ("text", "time_s"),
    [("90", 5400), ("2880", 172800), ("1:30", 90), ("24:00:00", 86400), ("2-12", 216000), ("2-12:30", 217800), ("1-00:00:05", 86405)],
)
def test_times_as_slurm_spells_them(text: str, time_s: int) -> None:
    assert parse_time_s(text) == time_s


@pytest.mark.parametrize("text", ["", "1h", "-1", "1:2", "a-1", "1-"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="is no time"):
        parse_time_s(text)
