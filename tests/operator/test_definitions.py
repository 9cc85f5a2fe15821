"""The definitions in `deploy/crds` and the structs of the same fields: a field in one of them alone is lost in the cluster."""

from __future__ import annotations

import enum
import re
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from dlrover.operator.status import JobPhase
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.api import ELASTIC_JOBS, SCALE_PLANS
from dlrover.platforms.kubernetes.elastic_job import ElasticJob, ElasticJobSpec, JobReplica
from dlrover.platforms.kubernetes.scale_plan import PlanObject, PlanPhase

CRDS = Path(__file__).parents[2] / "deploy" / "crds"
LARGEST = 40 * 1024
"""Bytes of all definitions: `kubectl apply` keeps a copy in an annotation of at most 256 KiB."""
OPAQUE = "x-kubernetes-preserve-unknown-fields"
PASSED_ON = {"template", "envs", "resources"}
"""Fields that our structs keep as plain JSON; the definition names some of their parts."""
NOT_OURS = {"scalePlan"}


def definition(plural: str) -> dict[str, Any]:
    loaded = yaml.safe_load((CRDS / f"{plural}.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def version_of(plural: str) -> dict[str, Any]:
    (version,) = definition(plural)["spec"]["versions"]
    return version  # type: ignore[no-any-return]


def schema_of(plural: str) -> dict[str, Any]:
    return version_of(plural)["schema"]["openAPIV3Schema"]  # type: ignore[no-any-return]


def test_all_definitions_together_are_small() -> None:
    assert sum(path.stat().st_size for path in CRDS.glob("*.yaml")) < LARGEST


@pytest.mark.parametrize("resource", [ELASTIC_JOBS, SCALE_PLANS])
def test_names_are_those_that_the_client_asks_for(resource: Any) -> None:
    spec = definition(resource.plural)["spec"]
    assert (spec["group"], spec["names"]["plural"], spec["names"]["kind"]) == (
        resource.group,
        resource.plural,
        resource.kind,
    )
    assert spec["names"]["listKind"] == f"{resource.kind}List"
    assert version_of(resource.plural)["name"] == resource.version
    assert definition(resource.plural)["metadata"]["name"] == f"{resource.plural}.{resource.group}"
    assert "status" in version_of(resource.plural)["subresources"]


@pytest.mark.parametrize(("plural", "struct"), [("elasticjobs", ElasticJob), ("scaleplans", PlanObject)])
def test_the_definition_has_the_fields_of_the_structs_and_no_others(plural: str, struct: type) -> None:
    schema = schema_of(plural)
    for part in ("spec", "status"):
        inner = next(field.type for field in msgspec.structs.fields(struct) if field.encode_name == part)
        assert list(differences(inner, schema["properties"][part], part)) == []


def differences(struct: Any, schema: dict[str, Any], path: str) -> typing.Iterator[str]:
    ours = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
    theirs = schema.get("properties", {})
    for name in ours.keys() ^ theirs.keys():
        # Lists of conditions differ: the old one has lastUpdateTime, the new one observedGeneration; one struct holds both.
        if not (path.endswith("conditions[]") and name in ("lastUpdateTime", "observedGeneration") and name in ours):
            yield f"{path}.{name} is only in the {'struct' if name in ours else 'definition'}"
    for name in ours.keys() & theirs.keys():
        yield from type_differences(ours[name], theirs[name], f"{path}.{name}")


def type_differences(ours: Any, theirs: dict[str, Any], path: str) -> typing.Iterator[str]:
    choices = [
        each
        for each in (typing.get_args(ours) if isinstance(ours, types.UnionType) else (ours,))
        if each not in (type(None), msgspec.UnsetType)
    ]
    kind = theirs.get("type", "any")
    first = choices[0]
    origin, arguments = typing.get_origin(first), typing.get_args(first)
    if path.rpartition(".")[2] in PASSED_ON:
        if kind != "object":
            yield f"{path} is {kind} in the definition and an object in the struct"
    elif isinstance(first, type) and issubclass(first, msgspec.Struct):
        yield from differences(first, theirs, path)
    elif origin is dict:
        yield from type_differences(arguments[1], theirs.get("additionalProperties", {}), f"{path}.*")
    elif origin is tuple:
        yield from type_differences(arguments[0], theirs.get("items", {}), f"{path}[]")
    elif isinstance(first, type) and issubclass(first, enum.Enum):
        if theirs.get("enum") != [each.value for each in first]:
            yield f"{path} has the values {theirs.get('enum')} in the definition and {[*first]} in the struct"
    else:
        wanted = {str: "string", int: "integer", bool: "boolean"}
        allowed = {wanted[each] for each in choices if each in wanted}
        if theirs.get("x-kubernetes-int-or-string"):
            kind = "string"
        if kind not in allowed:
            yield f"{path} is {kind} in the definition and {ours} in the struct"


def test_schemas_are_structural() -> None:
    """Each part has a type, or says that it has none; the API server refuses others."""
    for plural in ("elasticjobs", "scaleplans"):
        untyped = [
            path
            for path, schema in walk(schema_of(plural), plural)
            if "type" not in schema and not schema.get("x-kubernetes-int-or-string")
        ]
        assert untyped == []


def walk(schema: dict[str, Any], path: str) -> typing.Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from walk(schema[name], f"{path}.{name}")


def test_rules_are_bounded_and_have_a_sentence() -> None:
    """A rule that loops needs a bound on what it loops over, else the API server refuses the definition as too expensive."""
    for plural in ("elasticjobs", "scaleplans"):
        for path, schema in walk(schema_of(plural), plural):
            for rule in schema.get("x-kubernetes-validations", ()):
                assert rule["message"], path
                if "self.all(" in rule["rule"]:
                    assert "maxProperties" in schema, path
                if "self.containers.exists(" in rule["rule"]:
                    assert "maxItems" in schema["properties"]["containers"], path


def test_the_known_types_of_replicas_are_those_of_the_code() -> None:
    rule = schema_of("elasticjobs")["properties"]["spec"]["properties"]["replicaSpecs"]["x-kubernetes-validations"][0]
    assert set(re.findall(r"'([a-z-]+)'", rule["rule"])) == {
        "worker",
        "chief",
        "evaluator",
        "ps",
        "master",
        names.MASTER_TYPE,
    }


def test_the_length_of_a_name_is_that_of_the_code() -> None:
    rules = [each["rule"] for each in schema_of("elasticjobs")["x-kubernetes-validations"]]
    assert f"size(self.metadata.name) <= {names.MAX_JOB_NAME}" in rules


def test_columns_and_selectable_fields_exist_in_the_schema() -> None:
    for plural in ("elasticjobs", "scaleplans"):
        version = version_of(plural)
        scale = version["subresources"].get("scale", {})
        paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
        paths += [each["jsonPath"] for each in version["selectableFields"]] + list(scale.values())
        for path in paths:
            if path.startswith(".metadata."):
                continue
            schema = schema_of(plural)
            for name in path.strip(".").split("."):
                schema = schema.get("properties", {}).get(name) or schema["additionalProperties"]
            assert schema["type"] in ("string", "integer", "boolean"), path


def test_columns_and_short_names_are_those_that_people_expect() -> None:
    assert definition("elasticjobs")["spec"]["names"]["shortNames"] == ["ej"]
    assert definition("scaleplans")["spec"]["names"]["shortNames"] == ["sp"]
    columns = [column["name"] for column in version_of("elasticjobs")["additionalPrinterColumns"]]
    assert columns == ["Phase", "Ready", "Round", "Restarts", "Reason", "Age"]


def test_a_running_phase_of_the_rule_is_a_phase_of_the_code() -> None:
    (rule,) = [each["rule"] for each in schema_of("elasticjobs")["x-kubernetes-validations"] if "phase" in each["rule"]]
    (listed,) = re.findall(r"in \[([^\]]*)\]", rule)
    phases = set(re.findall(r"'(\w+)'", listed))
    assert phases - {"Scaling"} <= {each.value for each in JobPhase}
    assert not phases & {"Created", "Suspended", "Succeeded", "Failed"}


def test_phases_of_a_plan_are_named_in_the_definition() -> None:
    described = schema_of("scaleplans")["properties"]["status"]["properties"]["phase"]["description"]
    assert all(phase.value in described for phase in PlanPhase)


def test_texts_of_old_fields_are_still_taken() -> None:
    replica = {field.encode_name for field in msgspec.structs.fields(JobReplica)}
    assert {"BatchScheduler", "batchScheduler", "criticalNodes", "restartTimeout"} <= replica
    spec = {field.encode_name for field in msgspec.structs.fields(ElasticJobSpec)}
    assert {"brainService", "enableElasticScheduling", "enableDynamicSharding", "envs", "optimizeMode"} <= spec
