"""The manifests of the page fit the schemas of Kubernetes and of Kubeflow Trainer.

No test runs them: that needs a Kubernetes.
"""

import copy
import re

import pytest
from launch import REPO
from torch.distributed.run import get_args_parser

import mnmc_ddp_env

kubernetes_validate = pytest.importorskip("kubernetes_validate")
models = pytest.importorskip("kubeflow_trainer_api.models")
yaml = pytest.importorskip("yaml")

FOLDER = REPO / "docs" / "examples"
VERSION = "1.37"


def read_job():
    """The Service and the Job."""
    return list(yaml.safe_load_all((FOLDER / "kubernetes_job.yaml").read_text()))


def test_job_fits_the_schema():
    """Strictly: a field that is misspelt, or stands in the wrong place, is an error."""
    service, job = read_job()
    for document in (service, job):
        kubernetes_validate.validate(document, VERSION, strict=True)
    wrong = copy.deepcopy(job)
    wrong["spec"]["subdomain"] = wrong["spec"]["template"]["spec"].pop("subdomain")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_names_and_numbers_of_the_job_agree(monkeypatch):
    """Nodes, GPUs, names, volumes and options of torchrun: the schema knows nothing of them."""
    service, job = read_job()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    bash, option, line = container["command"]
    assert (bash, option) == ("bash", "-c") and line.startswith("exec torchrun ")
    argv = line.replace('"$JOB_COMPLETION_INDEX"', "1").split()[2:]
    args = get_args_parser().parse_args(argv)
    assert int(args.nnodes) == spec["completions"] == spec["parallelism"]
    assert int(args.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert args.master_addr == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert args.training_script == "mnmc_ddp_env.py"
    monkeypatch.setattr("sys.argv", [args.training_script, *args.training_script_args])
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert str(mnmc_ddp_env.parse_args().checkpoint.parent) in mounts


def keep_known_fields(train_job):
    """What Kubeflow's own class keeps of a TrainJob: it leaves out fields that it does not know."""
    return models.TrainerV1alpha1TrainJob.from_dict(train_job).to_dict()


def test_train_job_fits_the_classes_of_kubeflow():
    train_job = yaml.safe_load((FOLDER / "kubeflow_trainjob.yaml").read_text())
    assert keep_known_fields(copy.deepcopy(train_job)) == train_job
    trainer = train_job["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    wrong = copy.deepcopy(train_job)
    wrong["spec"]["trainer"]["nodes"] = wrong["spec"]["trainer"].pop("numNodes")
    assert keep_known_fields(copy.deepcopy(wrong)) != wrong


def test_page_says_that_they_were_not_run():
    text = (REPO / "docs" / "clusters.md").read_text()
    section = re.split(r"^## ", text.split("\n## Kubernetes\n")[1], flags=re.MULTILINE)[0]
    assert section.count("It was never run") == 2
