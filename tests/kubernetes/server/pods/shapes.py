"""
The shapes of built-in objects: which fields there are, and of which type.

A real server refuses a field of the wrong type with Go's own sentence, drops unknown fields, and refuses those too if
the client asks for strict validation. Parts that jobs do not use (`*`) are taken as they come.
"""

from __future__ import annotations

from typing import Any

from tests.kubernetes.server.answers import Json
from tests.kubernetes.server.quantities import quantity

# name: field=type ...; types: string, bool, int32, int64, quantity, port (number or text), [list], {map by text}, a shape, * (any).
_TEXT = """
ConfigMap: data={string} binaryData={string} immutable=bool
Secret: data={string} stringData={string} type=string immutable=bool
Pod: spec=PodSpec status=*
Service: spec=ServiceSpec status=*
ServiceSpec: ports=[ServicePort] selector={string} clusterIP=string clusterIPs=[string] type=string externalIPs=[string] \
 sessionAffinity=string externalName=string publishNotReadyAddresses=bool ipFamilies=[string] ipFamilyPolicy=string \
 internalTrafficPolicy=string externalTrafficPolicy=string healthCheckNodePort=int32 loadBalancerIP=string \
 loadBalancerSourceRanges=[string] loadBalancerClass=string allocateLoadBalancerNodePorts=bool sessionAffinityConfig=* trafficDistribution=string
ServicePort: name=string protocol=string port=int32 targetPort=port nodePort=int32 appProtocol=string
Lease: spec=LeaseSpec
LeaseSpec: holderIdentity=string leaseDurationSeconds=int32 acquireTime=string renewTime=string leaseTransitions=int32 \
 strategy=string preferredHolder=string
ResourceQuota: spec=ResourceQuotaSpec status=*
ResourceQuotaSpec: hard={quantity} scopes=[string] scopeSelector=*
PersistentVolumeClaim: spec=PersistentVolumeClaimSpec status=*
PersistentVolumeClaimSpec: accessModes=[string] selector=* resources=ResourceRequirements volumeName=string storageClassName=string \
 volumeMode=string dataSource=* dataSourceRef=* volumeAttributesClassName=string
PodDisruptionBudget: spec=PodDisruptionBudgetSpec status=*
PodDisruptionBudgetSpec: minAvailable=port maxUnavailable=port selector=* unhealthyPodEvictionPolicy=string
PriorityClass: value=int32 globalDefault=bool description=string preemptionPolicy=string
PodSpec: volumes=[Volume] initContainers=[Container] containers=[Container] ephemeralContainers=* restartPolicy=string \
 terminationGracePeriodSeconds=int64 activeDeadlineSeconds=int64 dnsPolicy=string nodeSelector={string} serviceAccountName=string \
 serviceAccount=string automountServiceAccountToken=bool nodeName=string hostNetwork=bool hostPID=bool hostIPC=bool \
 shareProcessNamespace=bool securityContext=PodSecurityContext imagePullSecrets=[LocalObjectReference] hostname=string \
 subdomain=string affinity=Affinity schedulerName=string tolerations=[Toleration] hostAliases=[HostAlias] \
 priorityClassName=string priority=int32 dnsConfig=PodDNSConfig readinessGates=[PodReadinessGate] runtimeClassName=string \
 enableServiceLinks=bool preemptionPolicy=string overhead={quantity} topologySpreadConstraints=[TopologySpreadConstraint] \
 setHostnameAsFQDN=bool os=PodOS hostUsers=bool schedulingGates=[PodSchedulingGate] resourceClaims=* \
 resources=ResourceRequirements hostnameOverride=string schedulingGroup=*
Volume: name=string hostPath=HostPathVolumeSource emptyDir=EmptyDirVolumeSource gcePersistentDisk=* awsElasticBlockStore=* gitRepo=* \
 secret=SecretVolumeSource nfs=NFSVolumeSource iscsi=* glusterfs=* persistentVolumeClaim=PersistentVolumeClaimVolumeSource rbd=* \
 flexVolume=* cinder=* cephfs=* flocker=* downwardAPI=DownwardAPIVolumeSource fc=* azureFile=* configMap=ConfigMapVolumeSource \
 vsphereVolume=* quobyte=* azureDisk=* photonPersistentDisk=* projected=ProjectedVolumeSource portworxVolume=* scaleIO=* \
 storageos=* csi=CSIVolumeSource ephemeral=* image=ImageVolumeSource
HostPathVolumeSource: path=string type=string
EmptyDirVolumeSource: medium=string sizeLimit=quantity
SecretVolumeSource: secretName=string items=[KeyToPath] defaultMode=int32 optional=bool
ConfigMapVolumeSource: name=string items=[KeyToPath] defaultMode=int32 optional=bool
NFSVolumeSource: server=string path=string readOnly=bool
PersistentVolumeClaimVolumeSource: claimName=string readOnly=bool
DownwardAPIVolumeSource: items=[DownwardAPIVolumeFile] defaultMode=int32
DownwardAPIVolumeFile: path=string fieldRef=ObjectFieldSelector resourceFieldRef=ResourceFieldSelector mode=int32
ProjectedVolumeSource: sources=[VolumeProjection] defaultMode=int32
VolumeProjection: secret=SecretProjection downwardAPI=DownwardAPIVolumeSource configMap=SecretProjection \
 serviceAccountToken=ServiceAccountTokenProjection clusterTrustBundle=* podCertificate=*
SecretProjection: name=string items=[KeyToPath] optional=bool
ServiceAccountTokenProjection: audience=string expirationSeconds=int64 path=string
CSIVolumeSource: driver=string readOnly=bool fsType=string volumeAttributes={string} nodePublishSecretRef=LocalObjectReference
ImageVolumeSource: reference=string pullPolicy=string
KeyToPath: key=string path=string mode=int32
LocalObjectReference: name=string
Container: name=string image=string command=[string] args=[string] workingDir=string ports=[ContainerPort] envFrom=[EnvFromSource] \
 env=[EnvVar] resources=ResourceRequirements resizePolicy=* restartPolicy=string restartPolicyRules=* volumeMounts=[VolumeMount] \
 volumeDevices=* livenessProbe=Probe readinessProbe=Probe startupProbe=Probe lifecycle=Lifecycle terminationMessagePath=string \
 terminationMessagePolicy=string imagePullPolicy=string securityContext=SecurityContext stdin=bool stdinOnce=bool tty=bool
ContainerPort: name=string hostPort=int32 containerPort=int32 protocol=string hostIP=string
EnvFromSource: prefix=string configMapRef=ConfigMapEnvSource secretRef=SecretEnvSource
ConfigMapEnvSource: name=string optional=bool
SecretEnvSource: name=string optional=bool
EnvVar: name=string value=string valueFrom=EnvVarSource
EnvVarSource: fieldRef=ObjectFieldSelector resourceFieldRef=ResourceFieldSelector configMapKeyRef=ConfigMapKeySelector \
 secretKeyRef=SecretKeySelector fileKeyRef=*
ObjectFieldSelector: apiVersion=string fieldPath=string
ResourceFieldSelector: containerName=string resource=string divisor=quantity
ConfigMapKeySelector: name=string key=string optional=bool
SecretKeySelector: name=string key=string optional=bool
ResourceRequirements: limits={quantity} requests={quantity} claims=*
VolumeMount: name=string readOnly=bool recursiveReadOnly=string mountPath=string subPath=string mountPropagation=string subPathExpr=string
Probe: exec=ExecAction httpGet=HTTPGetAction tcpSocket=TCPSocketAction grpc=* initialDelaySeconds=int32 timeoutSeconds=int32 \
 periodSeconds=int32 successThreshold=int32 failureThreshold=int32 terminationGracePeriodSeconds=int64
Lifecycle: postStart=LifecycleHandler preStop=LifecycleHandler stopSignal=string
LifecycleHandler: exec=ExecAction httpGet=HTTPGetAction tcpSocket=TCPSocketAction sleep=SleepAction
ExecAction: command=[string]
HTTPGetAction: path=string port=port host=string scheme=string httpHeaders=[HTTPHeader]
HTTPHeader: name=string value=string
TCPSocketAction: port=port host=string
SleepAction: seconds=int64
SecurityContext: capabilities=Capabilities privileged=bool seLinuxOptions=* windowsOptions=* runAsUser=int64 runAsGroup=int64 \
 runAsNonRoot=bool readOnlyRootFilesystem=bool allowPrivilegeEscalation=bool procMount=string seccompProfile=* appArmorProfile=*
Capabilities: add=[string] drop=[string]
PodSecurityContext: seLinuxOptions=* windowsOptions=* runAsUser=int64 runAsGroup=int64 runAsNonRoot=bool supplementalGroups=[int64] \
 supplementalGroupsPolicy=string fsGroup=int64 sysctls=* fsGroupChangePolicy=string seccompProfile=* appArmorProfile=* \
 seLinuxChangePolicy=string
Affinity: nodeAffinity=NodeAffinity podAffinity=* podAntiAffinity=*
NodeAffinity: requiredDuringSchedulingIgnoredDuringExecution=NodeSelector preferredDuringSchedulingIgnoredDuringExecution=[PreferredSchedulingTerm]
NodeSelector: nodeSelectorTerms=[NodeSelectorTerm]
PreferredSchedulingTerm: weight=int32 preference=NodeSelectorTerm
NodeSelectorTerm: matchExpressions=[NodeSelectorRequirement] matchFields=[NodeSelectorRequirement]
NodeSelectorRequirement: key=string operator=string values=[string]
Toleration: key=string operator=string value=string effect=string tolerationSeconds=int64
HostAlias: ip=string hostnames=[string]
PodDNSConfig: nameservers=[string] searches=[string] options=*
PodReadinessGate: conditionType=string
TopologySpreadConstraint: maxSkew=int32 topologyKey=string whenUnsatisfiable=string labelSelector=* minDomains=int32 \
 nodeAffinityPolicy=string nodeTaintsPolicy=string matchLabelKeys=[string]
PodOS: name=string
PodSchedulingGate: name=string
ObjectMeta: name=string generateName=string namespace=string selfLink=string uid=string resourceVersion=string generation=int64 \
 creationTimestamp=string deletionTimestamp=string deletionGracePeriodSeconds=int64 labels={string} annotations={string} \
 ownerReferences=[OwnerReference] finalizers=[string] managedFields=*
OwnerReference: apiVersion=string kind=string name=string uid=string controller=bool blockOwnerDeletion=bool
"""
_GO = {
    "string": "string",
    "bool": "bool",
    "int32": "int32",
    "int64": "int64",
    "port": "intstr.IntOrString",
    "quantity": "resource.Quantity",
}


def _read() -> dict[str, dict[str, str]]:
    shapes = {}
    for row in _TEXT.strip().replace("\\\n", "").splitlines():
        name, fields = row.split(":", 1)
        shapes[name] = dict(field.split("=", 1) for field in fields.split())
    return shapes


SHAPES = _read()


class WrongType(Exception):
    """A field has a value of another type. The text is Go's sentence."""


def fit(kind: str, body: Json) -> list[str]:
    """Drops unknown fields and nulls of a built-in object in place, and returns the paths of the unknown ones."""
    unknown: list[str] = []
    if isinstance(body.get("metadata"), dict):
        _fit("ObjectMeta", body["metadata"], "ObjectMeta", "metadata", "metadata", unknown)
    if kind in SHAPES:
        known = {"apiVersion", "kind", "metadata"}
        inner = {name: value for name, value in body.items() if name not in known}
        _fit(kind, inner, kind, "", "", unknown)
        for name in [name for name in body if name not in known]:
            del body[name]
        body.update(inner)
    return unknown


def _fit(shape: str, value: Any, holder: str, path: str, go_path: str, unknown: list[str]) -> None:
    if shape == "*" or value is None:
        return
    if shape.startswith("["):
        if not isinstance(value, list):
            raise _wrong(shape, value, holder, go_path)
        for index, part in enumerate(value):
            _fit(shape[1:-1], part, holder, f"{path}[{index}]", go_path, unknown)
    elif shape.startswith("{"):
        if not isinstance(value, dict):
            raise _wrong(shape, value, holder, go_path)
        for name, part in value.items():
            _fit(shape[1:-1], part, holder, f"{path}.{name}", go_path, unknown)
    elif shape in SHAPES:
        if not isinstance(value, dict):
            raise _wrong(shape, value, holder, go_path)
        _fit_fields(shape, value, path, go_path, unknown)
    else:
        _fit_plain(shape, value, holder, go_path)


def _fit_fields(shape: str, value: Json, path: str, go_path: str, unknown: list[str]) -> None:
    for name in list(value):
        below = f"{path}.{name}" if path else name
        if name not in SHAPES[shape]:
            unknown.append(below)
            del value[name]
        elif value[name] is None:
            del value[name]
        else:
            _fit(SHAPES[shape][name], value[name], shape, below, f"{go_path}.{name}" if go_path else name, unknown)


def _fit_plain(shape: str, value: Any, holder: str, go_path: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if shape == "quantity":
        if not isinstance(value, str) and not is_number:
            raise _wrong(shape, value, holder, go_path)
        try:
            quantity(value)
        except ValueError as error:
            raise WrongType(str(error)) from error
        return
    fits = {
        "string": isinstance(value, str),
        "bool": isinstance(value, bool),
        "int32": is_number and isinstance(value, int),
        "int64": is_number and isinstance(value, int),
        "port": isinstance(value, str) or (is_number and isinstance(value, int)),
    }[shape]
    if not fits:
        raise _wrong(shape, value, holder, go_path)


def _wrong(shape: str, value: Any, holder: str, go_path: str) -> WrongType:
    found = (
        "bool"
        if isinstance(value, bool)
        else "string"
        if isinstance(value, str)
        else "array"
        if isinstance(value, list)
        else ""
    )
    found = found or (
        "object" if isinstance(value, dict) else f"number {value}" if isinstance(value, float) else "number"
    )
    return WrongType(
        f"json: cannot unmarshal {found} into Go struct field {holder}.{go_path} of type {_go_type(shape)}"
    )


def _go_type(shape: str) -> str:
    if shape.startswith("["):
        return f"[]{_go_type(shape[1:-1])}"
    if shape == "{quantity}":
        return "v1.ResourceList"
    if shape.startswith("{"):
        return f"map[string]{_go_type(shape[1:-1])}"
    return _GO.get(shape, f"v1.{shape}")
