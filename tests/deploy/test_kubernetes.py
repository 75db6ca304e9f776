"""The manifests against Kubernetes' own schemas, and against what the product needs of them."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from service.settings import Settings, load_settings

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
OBJECTS = [found for path in sorted(FOLDER.glob("*.yml")) for found in yaml.safe_load_all(path.read_text())]
WORKLOADS = {found["metadata"]["name"]: found for found in OBJECTS if found["kind"] in ("Deployment", "StatefulSet")}
OURS = ("midsentence-api", "midsentence-engine")


def named(kind, name):
    (found,) = (each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def pod_of(name):
    return WORKLOADS[name]["spec"]["template"]["spec"]


def container_of(name):
    (container,) = pod_of(name)["containers"]
    return container


@pytest.mark.parametrize("version", ["1.30", "1.34"])
@pytest.mark.parametrize("found", OBJECTS, ids=lambda found: f"{found['kind']}-{found['metadata']['name']}")
def test_it_is_what_kubernetes_takes(found, version):
    kubernetes_validate.validate(found, version, strict=True)


def test_a_misspelt_field_is_found():
    broken = {**named("Service", "midsentence"), "spec": {"selektor": {}}}
    with pytest.raises(kubernetes_validate.ValidationError, match="selektor"):
        kubernetes_validate.validate(broken, "1.34", strict=True)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_pod_is_nobody_special_and_ends_in_order(name):
    pod, container = pod_of(name), container_of(name)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["enableServiceLinks"] is pod["automountServiceAccountToken"] is False
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert {"startupProbe", "livenessProbe", "readinessProbe", "resources"} <= container.keys()
    assert pod["terminationGracePeriodSeconds"] > Settings().drain_timeout_seconds
    assert container["image"].partition(":")[2] not in ("", "latest")


@pytest.mark.parametrize("name", WORKLOADS)
def test_selectors_find_their_pods_and_every_pod_may_be_evicted(name):
    labels = WORKLOADS[name]["spec"]["template"]["metadata"]["labels"]
    assert WORKLOADS[name]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    services = [each for each in OBJECTS if each["kind"] == "Service" and each["spec"]["selector"].items() <= labels.items()]
    (service,) = services
    (port,) = container_of(name)["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    if WORKLOADS[name]["kind"] == "StatefulSet":
        assert WORKLOADS[name]["spec"]["serviceName"] == service["metadata"]["name"]
    budget = named("PodDisruptionBudget", name)["spec"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    assert "maxUnavailable" in budget or budget["minAvailable"] < WORKLOADS[name]["spec"]["replicas"]


@pytest.mark.parametrize("name", OURS)
def test_the_settings_it_gives_are_settings(name):
    role = name.removeprefix("midsentence-")
    container = container_of(name)
    assert container["envFrom"] == [{"configMapRef": {"name": "midsentence"}}]
    assert container["args"] == [role]
    settings = load_settings(environ=named("ConfigMap", "midsentence")["data"]).settings
    host = str(settings.redis_url).removeprefix("redis://").partition(":")[0]
    assert named("Service", host)["spec"]["ports"][0]["port"] == 6379
    assert container["ports"][0]["containerPort"] == (settings.port if role == "api" else settings.engine_port)
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    # Kubernetes' volumes belong to root and are open to all: the data directory is one of ours inside.
    assert str(settings.data_dir.parent) in mounts
    assert mounts[str(settings.api_keys_file.parent)]["readOnly"] is True
    assert {"/tmp", "/var/cache/midsentence"} <= mounts.keys()  # the image's other places that are written to


def test_what_must_last_has_a_volume_of_its_own():
    for name, path in (("midsentence-valkey", "/data"), ("midsentence-engine", "/var/lib/midsentence")):
        claims = {claim["metadata"]["name"] for claim in WORKLOADS[name]["spec"]["volumeClaimTemplates"]}
        (mount,) = (mount for mount in container_of(name)["volumeMounts"] if mount["mountPath"] == path)
        assert mount["name"] in claims


def test_redis_keeps_what_it_acknowledges():
    arguments = container_of("midsentence-valkey")["args"][1:]
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--appendfsync"] == "always"
    assert options["--no-appendfsync-on-rewrite"] == "no"
    assert options["--maxmemory-policy"] == "noeviction"


def test_a_rollout_of_the_api_is_no_outage():
    assert WORKLOADS["midsentence-api"]["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    container = container_of("midsentence-api")
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod_of("midsentence-api")["terminationGracePeriodSeconds"] > Settings().drain_timeout_seconds + wait
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"  # an outage of Redis must not restart anybody
