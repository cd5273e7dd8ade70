"""Strict checks of Kubernetes manifests without a cluster: a field that the API server would not know is a problem.

Core objects are checked against the JSON schemas of Kubernetes releases (package kubernetes-validate), TrainJob and TrainingRuntime against
Kubeflow Trainer's own models (package kubeflow-trainer-api), whose generated `from_dict` would let unknown fields pass. PyTorchJob, which
no longer changes, is checked against the fields written down here, from the API reference of Training Operator 1.9
(https://github.com/kubeflow/training-operator/blob/release-1.9/docs/api/kubeflow.org_v1_generated.asciidoc).
"""

from __future__ import annotations

import functools
import typing
from typing import Any

_RUN_POLICY = {
    "cleanPodPolicy",
    "ttlSecondsAfterFinished",
    "activeDeadlineSeconds",
    "backoffLimit",
    "schedulingPolicy",
    "suspend",
    "managedBy",
}
_REPLICA = {"replicas", "template", "restartPolicy"}
_RESTART_POLICIES = {"Always", "OnFailure", "Never", "ExitCode"}


def problems(document: dict[str, Any], version: str) -> list[str]:
    """What Kubernetes of this version (with the operators) would refuse in a manifest; each with its path."""
    group = document["apiVersion"].rpartition("/")[0]
    if group == "trainer.kubeflow.org":
        return _trainer(document, version)
    if group == "kubeflow.org":
        return _pytorchjob(document, version)
    return _core(document, version)


def _core(document: dict[str, Any], version: str) -> list[str]:
    error = next(_validator(document["apiVersion"], document["kind"], version).iter_errors(document), None)
    return [] if error is None else [f"{'.'.join(map(str, error.path))}: {error.message}"]


@functools.cache
def _validator(api_version: str, kind: str, version: str) -> Any:
    """The strict schema of a kind. `kubernetes_validate.validate` would read it anew for each document, which takes most of its time."""
    from jsonschema.validators import Draft202012Validator
    from kubernetes_validate.utils import all_versions, schema_contents
    from referencing import Registry, Resource

    (release,) = {each for each in all_versions() if each.startswith(f"{version}.")}
    folder = f"kubernetes-json-schema/v{release}-local-strict"
    schema = schema_contents(f"{folder}/{kind.lower()}-{api_version.replace('/', '-')}.json", version)
    definitions = schema_contents(f"{folder}/_definitions.json", version)
    registry: Any = Resource.from_contents(definitions) @ Registry()
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ registry)


def _trainer(document: dict[str, Any], version: str) -> list[str]:
    from kubeflow_trainer_api import models
    from pydantic import ValidationError

    model = {"TrainJob": models.TrainerV1alpha1TrainJob, "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime}[document["kind"]]
    found = unknown_fields(model, document)
    try:
        model.model_validate(document)
    except ValidationError as error:
        # The generated models take amounts ("512Gi") for objects, although they are strings.
        errors = [each for each in error.errors() if not (each["msg"].endswith("ResourceQuantity") and isinstance(each["input"], str))]
        found += [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in errors]
    if document["kind"] == "TrainingRuntime":
        for replicated in document["spec"]["template"]["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": replicated["template"]["spec"]}
            found += _core(job, version)
    return found


def unknown_fields(model: Any, value: Any, path: str = "") -> list[str]:
    """Fields of a value that a generated pydantic model does not have, at any depth."""
    if isinstance(value, list):
        (item,) = typing.get_args(model) or (Any,)
        return [line for index, each in enumerate(value) for line in unknown_fields(_plain(item), each, f"{path}[{index}]")]
    fields = getattr(model, "model_fields", None)
    if not isinstance(value, dict) or fields is None:
        return []  # a scalar, or a map with free keys
    types = {field.alias or name: _plain(field.annotation) for name, field in fields.items()}
    found = [f"{path}.{name}: {model.__name__} has no such field" for name in value if name not in types]
    return found + [line for name, each in value.items() if name in types for line in unknown_fields(types[name], each, f"{path}.{name}")]


def _plain(annotation: Any) -> Any:
    """A type without Optional and Annotated around it."""
    while typing.get_origin(annotation) in (typing.Union, typing.Annotated):
        annotation = next(each for each in typing.get_args(annotation) if each is not type(None))
    return annotation


def _pytorchjob(document: dict[str, Any], version: str) -> list[str]:
    spec = document["spec"]
    found = _not_among(document, {"apiVersion", "kind", "metadata", "spec"}, "")
    found += _not_among(spec, {"runPolicy", "elasticPolicy", "pytorchReplicaSpecs", "nprocPerNode"}, "spec")
    found += _not_among(spec.get("runPolicy", {}), _RUN_POLICY, "spec.runPolicy")
    found += _not_among(spec["pytorchReplicaSpecs"], {"Master", "Worker"}, "spec.pytorchReplicaSpecs")
    if not isinstance(spec.get("nprocPerNode", ""), str):
        found.append("spec.nprocPerNode: a string")
    for name in {"Master", "Worker"} & set(spec["pytorchReplicaSpecs"]):
        replica = spec["pytorchReplicaSpecs"][name]
        found += _not_among(replica, _REPLICA, f"spec.pytorchReplicaSpecs.{name}")
        if replica.get("restartPolicy") not in _RESTART_POLICIES:
            found.append(f"spec.pytorchReplicaSpecs.{name}.restartPolicy: one of {', '.join(sorted(_RESTART_POLICIES))}")
        found += _core(
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": document["metadata"], "template": replica["template"]}, version
        )
    return found


def _not_among(value: dict[str, Any], names: set[str], path: str) -> list[str]:
    return [f"{path}.{name}: no such field" for name in value if name not in names]
