//! Pods and containers by the Container Runtime Interface, version 1.
//!
//! The messages are those of `pkg/apis/runtime/v1/api.proto` (kubernetes/cri-api),
//! as far as they are of use here; fields that are left out are skipped when they
//! come. containerd 1.6 - 2.1 and CRI-O speak version 1.

use std::{
    collections::BTreeMap,
    error::Error as _,
    io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use futures_util::{StreamExt as _, stream};
use hyper::http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use prost::Message;
use serde::Deserialize;
use tokio::{
    net::UnixStream,
    time::{Instant, timeout_at},
};
use tonic::{
    Code, Request, Status,
    client::Grpc,
    transport::{Channel, Endpoint, Uri},
};
use tonic_prost::ProstCodec;

use super::{Container, Inventory, PATIENCE, Place, Pod, Reason, Refusal, is_of_host, netns_of};

/// The state of a sandbox that is up (`SANDBOX_READY`).
const SANDBOX_READY: i32 = 0;
/// The state of a container that is neither made yet nor over (`CONTAINER_RUNNING`).
const CONTAINER_RUNNING: i32 = 1;
/// A sandbox in the network namespace of the host (`NamespaceMode.NODE`).
const NODE: i32 = 2;
/// Sandboxes that are asked about at the same time.
const ASKED_AT_ONCE: usize = 16;
/// Largest answer that is taken, in bytes: thousands of containers with long annotations.
const ANSWER_MAX: usize = 64 << 20;

#[derive(Clone, PartialEq, Message)]
pub(super) struct ListPodSandboxRequest {}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ListPodSandboxResponse {
    #[prost(message, repeated, tag = "1")]
    pub(super) items: Vec<PodSandbox>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PodSandbox {
    #[prost(string, tag = "1")]
    pub(super) id: String,
    #[prost(message, optional, tag = "2")]
    pub(super) metadata: Option<PodSandboxMetadata>,
    #[prost(int32, tag = "3")]
    pub(super) state: i32,
    #[prost(btree_map = "string, string", tag = "5")]
    pub(super) labels: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PodSandboxMetadata {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) uid: String,
    #[prost(string, tag = "3")]
    pub(super) namespace: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PodSandboxStatusRequest {
    #[prost(string, tag = "1")]
    pub(super) pod_sandbox_id: String,
    #[prost(bool, tag = "2")]
    pub(super) verbose: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PodSandboxStatusResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) status: Option<PodSandboxStatus>,
    /// What the runtime tells beyond the interface; `info` is JSON.
    #[prost(btree_map = "string, string", tag = "2")]
    pub(super) info: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PodSandboxStatus {
    #[prost(message, optional, tag = "5")]
    pub(super) network: Option<PodSandboxNetworkStatus>,
    #[prost(message, optional, tag = "6")]
    pub(super) linux: Option<LinuxPodSandboxStatus>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PodSandboxNetworkStatus {
    #[prost(string, tag = "1")]
    pub(super) ip: String,
    #[prost(message, repeated, tag = "2")]
    pub(super) additional_ips: Vec<PodIp>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PodIp {
    #[prost(string, tag = "1")]
    pub(super) ip: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct LinuxPodSandboxStatus {
    #[prost(message, optional, tag = "1")]
    pub(super) namespaces: Option<Namespace>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct Namespace {
    #[prost(message, optional, tag = "2")]
    pub(super) options: Option<NamespaceOption>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct NamespaceOption {
    #[prost(int32, tag = "1")]
    pub(super) network: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ListContainersRequest {}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ListContainersResponse {
    #[prost(message, repeated, tag = "1")]
    pub(super) containers: Vec<ContainerEntry>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ContainerEntry {
    #[prost(string, tag = "1")]
    pub(super) id: String,
    #[prost(string, tag = "2")]
    pub(super) pod_sandbox_id: String,
    #[prost(message, optional, tag = "3")]
    pub(super) metadata: Option<ContainerMetadata>,
    #[prost(int32, tag = "6")]
    pub(super) state: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ContainerMetadata {
    #[prost(string, tag = "1")]
    pub(super) name: String,
}

/// The `info` of a sandbox, as containerd and CRI-O write it.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Info {
    pid: Option<u32>,
    runtime_spec: Option<RuntimeSpec>,
    cni_result: Option<CniResult>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RuntimeSpec {
    linux: Option<LinuxSpec>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct LinuxSpec {
    namespaces: Vec<NamespaceSpec>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct NamespaceSpec {
    #[serde(rename = "type")]
    kind: String,
    path: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct CniResult {
    interfaces: BTreeMap<String, Option<CniInterface>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct CniInterface {
    sandbox: String,
}

/// What is asked about a sandbox once, since it stays while its network namespace does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Details {
    place: Option<Place>,
    host_network: bool,
    addresses: Vec<IpAddr>,
    pid: Option<u32>,
    interface: Option<String>,
}

/// A runtime that speaks the interface.
pub(super) struct Client {
    socket: PathBuf,
    channel: Option<Channel>,
    details: BTreeMap<String, Details>,
}

impl Client {
    pub(super) fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
            channel: None,
            details: BTreeMap::new(),
        }
    }

    /// Who runs here, within [`PATIENCE`].
    ///
    /// # Errors
    /// Pods or containers could not be listed. A sandbox that alone could not be asked about is listed without a place.
    pub(super) async fn ask(&mut self) -> Result<Inventory, Refusal> {
        let deadline = Instant::now() + PATIENCE;
        let answer = match timeout_at(deadline, self.list()).await {
            Ok(answer) => answer,
            Err(_) => Err(Reason::Silent),
        };
        let (sandboxes, containers) = answer.map_err(|reason| {
            // The next round begins anew.
            self.channel = None;
            Refusal {
                socket: self.socket.clone(),
                reason,
            }
        })?;
        self.look_at_new(&sandboxes, deadline).await;
        Ok(self.inventory(sandboxes, containers))
    }

    async fn list(&mut self) -> Result<(Vec<PodSandbox>, Vec<ContainerEntry>), Reason> {
        let channel = match &self.channel {
            Some(channel) => channel.clone(),
            None => self.channel.insert(connect(&self.socket).await?).clone(),
        };
        let pods: ListPodSandboxResponse = call(&channel, "ListPodSandbox", ListPodSandboxRequest {}).await?;
        let containers: ListContainersResponse =
            call(&channel, "ListContainers", ListContainersRequest {}).await?;
        let mut sandboxes = pods.items;
        sandboxes.retain(|sandbox| sandbox.state == SANDBOX_READY);
        let mut containers = containers.containers;
        containers.retain(|container| container.state == CONTAINER_RUNNING);
        Ok((sandboxes, containers))
    }

    /// Asks about sandboxes that were not known before, until the deadline; what is left has its turn in the next round.
    async fn look_at_new(&mut self, sandboxes: &[PodSandbox], deadline: Instant) {
        self.details.retain(|id, details| {
            sandboxes.iter().any(|sandbox| sandbox.id == *id)
                && details.place.as_ref().is_some_and(Place::holds)
        });
        let Some(channel) = self.channel.clone() else {
            return;
        };
        let new = sandboxes.iter().map(|sandbox| sandbox.id.clone());
        let new: Vec<String> = new.filter(|id| !self.details.contains_key(id)).collect();
        let mut answers = stream::iter(new)
            .map(|id| {
                let channel = channel.clone();
                async move {
                    let request = PodSandboxStatusRequest {
                        pod_sandbox_id: id.clone(),
                        verbose: true,
                    };
                    (id, call(&channel, "PodSandboxStatus", request).await)
                }
            })
            .buffer_unordered(ASKED_AT_ONCE);
        while let Ok(Some((id, answer))) = timeout_at(deadline, answers.next()).await {
            // One that is gone already is not in the next list.
            if let Ok(status) = answer {
                self.details.insert(id, details(&status));
            }
        }
    }

    fn inventory(&self, sandboxes: Vec<PodSandbox>, containers: Vec<ContainerEntry>) -> Inventory {
        let pods = sandboxes.into_iter().map(|sandbox| {
            let metadata = sandbox.metadata.unwrap_or_default();
            let details = self.details.get(&sandbox.id).cloned().unwrap_or_default();
            Pod {
                id: sandbox.id,
                namespace: metadata.namespace,
                name: metadata.name,
                uid: metadata.uid,
                labels: sandbox.labels,
                host_network: details.host_network || details.place.as_ref().is_some_and(is_of_host),
                addresses: details.addresses,
                pid: details.pid,
                interface: details.interface,
                place: details.place,
            }
        });
        let containers = containers.into_iter().map(|container| Container {
            id: container.id,
            name: container.metadata.unwrap_or_default().name,
            pod: Some(container.pod_sandbox_id),
            ..Container::default()
        });
        Inventory {
            pods: pods.collect(),
            containers: containers.collect(),
        }
    }
}

fn details(response: &PodSandboxStatusResponse) -> Details {
    let status = response.status.clone().unwrap_or_default();
    let info = response.info.get("info");
    // A runtime that tells less than others has only the less told.
    let info: Info = info
        .and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default();
    let options = status.linux.and_then(|linux| linux.namespaces?.options);
    let host_network = options.is_some_and(|options| options.network == NODE);
    let namespaces = info
        .runtime_spec
        .and_then(|spec| spec.linux)
        .unwrap_or_default()
        .namespaces;
    let named = namespaces
        .into_iter()
        .filter(|namespace| namespace.kind == "network" && !namespace.path.is_empty())
        .map(|namespace| PathBuf::from(namespace.path));
    let network = status.network.unwrap_or_default();
    let addresses = std::iter::once(network.ip.as_str())
        .chain(network.additional_ips.iter().map(|more| more.ip.as_str()))
        .filter(|_| !host_network)
        .filter_map(|address| address.parse().ok());
    let interfaces = info.cni_result.unwrap_or_default().interfaces;
    let outside = |name: &String| {
        // The bridge is outside, too, and belongs to all.
        interfaces[name]
            .as_ref()
            .is_some_and(|interface| interface.sandbox.is_empty())
            && name.starts_with("veth")
    };
    let place = Place::first(named.chain(netns_of(info.pid)));
    Details {
        place: place.or_else(|| host_network.then(Place::of_host).flatten()),
        host_network,
        addresses: addresses.collect(),
        pid: info.pid,
        interface: interfaces.keys().find(|name| outside(name)).cloned(),
    }
}

async fn connect(socket: &Path) -> Result<Channel, Reason> {
    // Tried first, as what the system says of it is lost on the way through the channel.
    drop(
        UnixStream::connect(socket)
            .await
            .map_err(|error| Reason::connect(&error))?,
    );
    let socket = socket.to_owned();
    // The address is of no meaning on a Unix socket, but a request has one.
    Endpoint::from_static("http://localhost")
        .connect_with_connector(tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { Ok::<_, io::Error>(TokioIo::new(UnixStream::connect(socket).await?)) }
        }))
        .await
        .map_err(|error| Reason::Failed(innermost(&error)))
}

async fn call<Q, A>(channel: &Channel, method: &'static str, question: Q) -> Result<A, Reason>
where
    Q: Message + Send + Sync + 'static,
    A: Message + Default + Send + Sync + 'static,
{
    let path = format!("/runtime.v1.RuntimeService/{method}");
    let path = PathAndQuery::try_from(path).map_err(|error| Reason::Failed(error.to_string()))?;
    let mut grpc = Grpc::new(channel.clone()).max_decoding_message_size(ANSWER_MAX);
    grpc.ready()
        .await
        .map_err(|error| Reason::Failed(innermost(&error)))?;
    let answer = grpc
        .unary(Request::new(question), path, ProstCodec::<Q, A>::default())
        .await;
    answer
        .map(tonic::Response::into_inner)
        .map_err(|status| refused(method, &status))
}

fn refused(method: &str, status: &Status) -> Reason {
    match status.code() {
        Code::Unimplemented => Reason::NotOffered,
        _ => Reason::Failed(match status.source() {
            Some(_) => format!("{method}: {}", innermost(status)),
            None => format!("{method}: {}", status.message()),
        }),
    }
}

/// What is at the bottom of an error: the rest says only that something failed.
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::PermissionsExt as _, time::Duration};

    use super::{
        super::fake::{self, Behaviour},
        *,
    };

    /// What containerd 1.7 tells of a sandbox, shortened.
    fn info(path: &str, pid: u32) -> String {
        format!(
            r#"{{"pid":{pid},"processStatus":"running","netNamespaceClosed":false,"runtimeSpec":{{"ociVersion":"1.1.0",
            "linux":{{"namespaces":[{{"type":"pid"}},{{"type":"network","path":"{path}"}}]}}}},
            "cniResult":{{"Interfaces":{{"cni0":{{"IPConfigs":null,"Mac":"aa","Sandbox":""}},
            "eth0":{{"IPConfigs":[{{"IP":"10.88.0.5"}}],"Mac":"bb","Sandbox":"{path}"}},
            "lo":{{"IPConfigs":null,"Mac":"","Sandbox":"{path}"}},"veth1a2b3c4d":{{"Mac":"cc","Sandbox":""}}}}}}}}"#
        )
    }

    fn status(network: i32, info: &str) -> PodSandboxStatusResponse {
        PodSandboxStatusResponse {
            status: Some(PodSandboxStatus {
                network: Some(PodSandboxNetworkStatus {
                    ip: "10.88.0.5".into(),
                    additional_ips: vec![PodIp { ip: "fd00::5".into() }],
                }),
                linux: Some(LinuxPodSandboxStatus {
                    namespaces: Some(Namespace {
                        options: Some(NamespaceOption { network }),
                    }),
                }),
            }),
            info: [("info".to_owned(), info.to_owned())].into(),
        }
    }

    #[test]
    fn details_are_read_as_containerd_writes_them() {
        let own = PathBuf::from(format!("/proc/{}/ns/net", std::process::id()));
        let found = details(&status(0, &info("/no/such/netns", std::process::id())));
        assert_eq!(
            found,
            Details {
                place: Place::first([own]),
                host_network: false,
                addresses: vec!["10.88.0.5".parse().unwrap(), "fd00::5".parse().unwrap()],
                pid: Some(std::process::id()),
                interface: Some("veth1a2b3c4d".into()),
            }
        );
        let of_host = details(&status(NODE, "{}"));
        assert!(of_host.host_network && of_host.addresses.is_empty() && of_host.place == Place::of_host());
        assert_eq!(details(&status(0, "no JSON")).pid, None);
        assert_eq!(details(&PodSandboxStatusResponse::default()), Details::default());
    }

    #[tokio::test]
    async fn pods_and_containers_are_told() {
        let server = fake::cri(Behaviour::Pods(|| {
            let status = |_: &str| status(0, &info("/proc/self/ns/net", std::process::id()));
            fake::Pods::two(status)
        }));
        let mut client = Client::new(server.path());
        let inventory = client.ask().await.unwrap();
        let names: Vec<_> = inventory.pods.iter().map(Pod::full_name).collect();
        assert_eq!(
            names,
            ["default/web", "kube-system/dns"],
            "the stopped one is left out"
        );
        let web = &inventory.pods[0];
        assert_eq!(web.labels.get("app").map(String::as_str), Some("web"));
        let own = std::fs::metadata("/proc/self/ns/net").unwrap();
        assert_eq!(
            web.place.as_ref().map(|place| u64::from(place.inode)),
            Some(std::os::unix::fs::MetadataExt::ino(&own))
        );
        let containers: Vec<_> = inventory
            .containers
            .iter()
            .map(|each| (each.name.as_str(), each.pod.as_deref()))
            .collect();
        assert_eq!(containers, [("nginx", Some(web.id.as_str()))]);
        // The second round asks for no status again, and tells the same.
        assert_eq!(client.ask().await.unwrap(), inventory);
        assert_eq!(server.statuses(), 2);
    }

    async fn refusal(socket: &Path) -> (Reason, Duration) {
        let started = std::time::Instant::now();
        let refusal = Client::new(socket).ask().await.unwrap_err();
        assert_eq!(refusal.socket, socket);
        (refusal.reason, started.elapsed())
    }

    const AT_MOST: Duration = Duration::from_secs(2);

    #[tokio::test]
    async fn a_missing_socket_is_told_at_once() {
        let (reason, took) = refusal(Path::new("/no/such.sock")).await;
        assert!(
            matches!(reason, Reason::Connect(io::ErrorKind::NotFound, _)),
            "{reason:?}"
        );
        assert!(took < AT_MOST);
    }

    #[tokio::test]
    async fn a_socket_that_nobody_listens_on_is_told_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cri.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let (reason, took) = refusal(&path).await;
        assert!(
            matches!(reason, Reason::Connect(io::ErrorKind::ConnectionRefused, _)),
            "{reason:?}"
        );
        assert!(took < AT_MOST);
    }

    #[test]
    fn a_refused_permission_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cri.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
        let (reason, _) = fake::without_privileges(&path);
        assert!(
            matches!(reason, Reason::Connect(io::ErrorKind::PermissionDenied, _)),
            "{reason:?}"
        );
    }

    #[tokio::test]
    async fn one_that_never_answers_is_given_up() {
        let server = fake::cri(Behaviour::Silent);
        let (reason, took) = refusal(server.path()).await;
        assert_eq!(reason, Reason::Silent);
        assert!(took >= PATIENCE && took < AT_MOST, "{took:?}");
    }

    #[tokio::test]
    async fn one_that_answers_half_is_given_up() {
        let server = fake::cri(Behaviour::DiesAfter(30));
        let (reason, took) = refusal(server.path()).await;
        assert!(matches!(reason, Reason::Failed(_)), "{reason:?}");
        assert!(took < AT_MOST, "{took:?}");
    }

    #[tokio::test]
    async fn rubbish_is_refused() {
        for rubbish in [
            &b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n400 Bad Request"[..],
            &[0; 4096],
        ] {
            let server = fake::cri(Behaviour::Rubbish(rubbish));
            let (reason, took) = refusal(server.path()).await;
            assert!(matches!(reason, Reason::Failed(_)), "{reason:?}");
            assert!(took < AT_MOST, "{took:?}");
        }
    }

    #[tokio::test]
    async fn one_without_the_interface_is_told_from_one_that_fails() {
        let server = fake::cri(Behaviour::Unimplemented);
        assert_eq!(refusal(server.path()).await.0, Reason::NotOffered);
    }

    #[tokio::test]
    async fn a_sandbox_that_is_not_told_of_in_time_keeps_its_name() {
        let server = fake::cri(Behaviour::StatusesHang);
        let started = std::time::Instant::now();
        let inventory = Client::new(server.path()).ask().await.unwrap();
        assert!(started.elapsed() < AT_MOST);
        assert_eq!(inventory.pods.len(), 2);
        assert!(inventory.pods.iter().all(|pod| pod.place.is_none()));
    }

    #[tokio::test]
    async fn a_runtime_that_comes_back_is_asked_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cri.sock");
        let pods = || fake::Pods::two(|_| PodSandboxStatusResponse::default());
        let mut client = Client::new(&path);
        let first = fake::cri_at(&path, Behaviour::Pods(pods));
        assert_eq!(client.ask().await.unwrap().pods.len(), 2);
        drop(first);
        assert!(client.ask().await.is_err());
        let _second = fake::cri_at(&path, Behaviour::Pods(pods));
        assert_eq!(client.ask().await.unwrap().pods.len(), 2);
    }
}
