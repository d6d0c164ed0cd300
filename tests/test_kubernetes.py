"""The manifest of the page fits the schema of Kubernetes. No test runs it."""

import pytest
from launch import REPO
from torch.distributed.run import get_args_parser

kubernetes_validate = pytest.importorskip("kubernetes_validate")
yaml = pytest.importorskip("yaml")

FOLDER = REPO / "docs" / "examples"


def test_job_fits_the_schema_and_its_names_agree():
    """Strictly: a field that is misspelt, or stands in the wrong place, is an error."""
    service, job = yaml.safe_load_all((FOLDER / "kubernetes_job.yaml").read_text())
    for document in (service, job):
        kubernetes_validate.validate(document, "1.37", strict=True)
    # Of names, nodes and GPUs the schema knows nothing.
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    mounts, volumes = container["volumeMounts"], pod["volumes"]
    assert {mount["name"] for mount in mounts} == {volume["name"] for volume in volumes}
    line = container["command"][2].replace('"$JOB_COMPLETION_INDEX"', "1")
    args = get_args_parser().parse_args(line.removeprefix("exec torchrun ").split())
    assert int(args.nnodes) == spec["completions"] == spec["parallelism"]
    assert int(args.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert args.master_addr == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert args.training_script == "mnmc_ddp_env.py"
