//! A real containerd with its CRI plugin, runc and a bridge of CNI: pods as a node of Kubernetes has them.
//!
//! What the kubelet would ask for, these few calls of the Container Runtime Interface ask for
//! (`pkg/apis/runtime/v1/api.proto`, kubernetes/cri-api). The one image is made of the guest's busybox.

use std::{
    collections::HashMap,
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
    time::Duration,
};

use anyhow::{Context, bail, ensure};
use hyper_util::rt::TokioIo;
use nix::{sys::signal::Signal, unistd::Pid};
use prost::Message;
use tokio::{net::UnixStream, runtime::Runtime, time::timeout};
use tonic::{
    Request,
    client::Grpc,
    transport::{Channel, Endpoint, Uri},
};
use tonic_prost::ProstCodec;

use crate::{Netns, Result, netns::run, sockets::wait_until};

/// The program; a guest without pods does not have it.
const PROGRAM: &str = "/usr/bin/containerd";
/// Where it listens.
const SOCKET: &str = "/run/containerd/containerd.sock";
/// Its files.
const ROOT: &str = "/tmp/containerd";
/// Its image, which every pod and container is made of.
const IMAGE: &str = "localhost/busybox:1";
/// What one call may take in an emulated guest.
const CALL: Duration = Duration::from_mins(1);

/// runc's usual `pivot_root` does not work where the root is an initial file system (Documentation/filesystems/ramfs-rootfs-initramfs.rst).
const CONFIGURATION: &str = r#"version = 2
root = "/tmp/containerd/root"
state = "/run/containerd"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost/busybox:1"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "/tmp/containerd/cni"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
NoPivotRoot = true
"#;

const NETWORK: &str = r#"{"cniVersion":"0.4.0","name":"pods","plugins":[{"type":"bridge","bridge":"cni0","isGateway":true,
"ipam":{"type":"host-local","ranges":[[{"subnet":"10.88.0.0/16"}]],"routes":[{"dst":"0.0.0.0/0"}]}}]}"#;

/// Makes the image and loads it; `sleep` is what a container runs, and what holds a pod.
const LOAD_IMAGE: &str = r#"set -e
mkdir -p layer/bin
cp /usr/bin/busybox layer/bin/
tar -C layer -cf layer.tar .
digest=$(sha256sum layer.tar | cut -d' ' -f1)
echo '{"architecture":"amd64","os":"linux","config":{"Entrypoint":["/bin/busybox","sleep","100000"]},"rootfs":{"type":"layers","diff_ids":["sha256:'$digest'"]}}' >config.json
echo '[{"Config":"config.json","RepoTags":["localhost/busybox:1"],"Layers":["layer.tar"]}]' >manifest.json
tar -cf image.tar config.json manifest.json layer.tar
ctr -n k8s.io images import image.tar
"#;

#[derive(Clone, PartialEq, Message)]
struct Metadata {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    uid: String,
    #[prost(string, tag = "3")]
    namespace: String,
    #[prost(uint32, tag = "4")]
    attempt: u32,
}

#[derive(Clone, PartialEq, Message)]
struct PodConfig {
    #[prost(message, optional, tag = "1")]
    metadata: Option<Metadata>,
    #[prost(map = "string, string", tag = "6")]
    labels: HashMap<String, String>,
    #[prost(message, optional, tag = "8")]
    linux: Option<LinuxPodConfig>,
}

#[derive(Clone, PartialEq, Message)]
struct LinuxPodConfig {
    #[prost(string, tag = "1")]
    cgroup_parent: String,
}

#[derive(Clone, PartialEq, Message)]
struct RunPodRequest {
    #[prost(message, optional, tag = "1")]
    config: Option<PodConfig>,
}

/// Of every call that names a sandbox or container by its id: also an answer that is one.
#[derive(Clone, PartialEq, Message)]
struct Id {
    #[prost(string, tag = "1")]
    id: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct Nothing {}

#[derive(Clone, PartialEq, Message)]
struct StatusRequest {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(bool, tag = "2")]
    verbose: bool,
}

#[derive(Clone, PartialEq, Message)]
struct StatusResponse {
    #[prost(message, optional, tag = "1")]
    status: Option<PodStatus>,
    #[prost(map = "string, string", tag = "2")]
    info: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct PodStatus {
    #[prost(message, optional, tag = "5")]
    network: Option<NetworkStatus>,
}

#[derive(Clone, PartialEq, Message)]
struct NetworkStatus {
    #[prost(string, tag = "1")]
    ip: String,
}

#[derive(Clone, PartialEq, Message)]
struct CreateRequest {
    #[prost(string, tag = "1")]
    pod: String,
    #[prost(message, optional, tag = "2")]
    config: Option<ContainerConfig>,
    #[prost(message, optional, tag = "3")]
    pod_config: Option<PodConfig>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerConfig {
    #[prost(message, optional, tag = "1")]
    metadata: Option<Metadata>,
    #[prost(message, optional, tag = "2")]
    image: Option<Image>,
    #[prost(string, repeated, tag = "3")]
    command: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Image {
    #[prost(string, tag = "1")]
    name: String,
}

/// The daemon, which lives as long as the guest.
pub struct Containerd {
    child: Child,
    runtime: Runtime,
    channel: Channel,
}

/// A pod with one container, `app`.
#[derive(Debug)]
pub struct Pod {
    id: String,
    container: String,
    /// Its network namespace.
    pub netns: Netns,
    /// Its address.
    pub address: IpAddr,
}

impl Containerd {
    /// The one of this guest, started when it is first asked for; `None` where the guest has none.
    ///
    /// # Errors
    /// It does not start; what it said is part of the error.
    pub fn get() -> Result<Option<&'static Self>> {
        static ONE: OnceLock<std::result::Result<Containerd, String>> = OnceLock::new();
        if !Path::new(PROGRAM).exists() {
            return Ok(None);
        }
        match ONE.get_or_init(|| Self::start().map_err(|error| format!("{error:#}"))) {
            Ok(one) => Ok(Some(one)),
            Err(error) => bail!("{error}; containerd said: {}", said()),
        }
    }

    fn start() -> Result<Self> {
        let network = Path::new(ROOT).join("cni");
        fs::create_dir_all(&network)?;
        fs::create_dir_all("/dev/mqueue")?;
        fs::write(network.join("pods.conflist"), NETWORK)?;
        fs::write("/etc/resolv.conf", "")?;
        let configuration = Path::new(ROOT).join("config.toml");
        fs::write(&configuration, CONFIGURATION)?;
        delegate_controllers()?;
        let log = fs::File::create(Path::new(ROOT).join("log"))?;
        let child = Command::new(PROGRAM)
            .arg("--config")
            .arg(&configuration)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start containerd")?;
        wait_until("containerd", || Ok(run("ctr version").is_ok()))?;
        let loaded = Command::new("sh")
            .args(["-c", LOAD_IMAGE])
            .current_dir(ROOT)
            .output()?;
        ensure!(
            loaded.status.success(),
            "cannot load the image: {}",
            String::from_utf8_lossy(&loaded.stderr)
        );
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let connect = tower::service_fn(|_: Uri| async {
            Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(SOCKET).await?))
        });
        let endpoint = Endpoint::from_static("http://localhost");
        let channel = runtime.block_on(endpoint.connect_with_connector(connect))?;
        Ok(Self {
            child,
            runtime,
            channel,
        })
    }

    fn call<Q, A>(&self, method: &str, question: Q) -> Result<A>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let path = format!("/runtime.v1.RuntimeService/{method}").parse()?;
        let mut grpc = Grpc::new(self.channel.clone());
        let answer = self.runtime.block_on(async {
            grpc.ready().await?;
            let called = grpc.unary(Request::new(question), path, ProstCodec::<Q, A>::default());
            Ok::<_, anyhow::Error>(timeout(CALL, called).await??.into_inner())
        });
        answer.with_context(|| format!("{method}; containerd said: {}", said()))
    }

    /// Starts a pod of the namespace `default`, with one container, `app`, that does nothing.
    pub fn run_pod(&self, name: &str) -> Result<Pod> {
        self.run_pod_with(name, "sleep 100000")
    }

    /// The same with what the container runs, in words of busybox.
    pub fn run_pod_with(&self, name: &str, command: &str) -> Result<Pod> {
        let metadata = |name: &str| Metadata {
            name: name.to_owned(),
            uid: format!("uid-of-{name}"),
            namespace: "default".to_owned(),
            attempt: 0,
        };
        let config = PodConfig {
            metadata: Some(metadata(name)),
            labels: [("app".to_owned(), name.to_owned())].into(),
            linux: Some(LinuxPodConfig {
                cgroup_parent: format!("/kubepods/pod-{name}"),
            }),
        };
        let Id { id } = self.call(
            "RunPodSandbox",
            RunPodRequest {
                config: Some(config.clone()),
            },
        )?;
        let container: Id = self.call(
            "CreateContainer",
            CreateRequest {
                pod: id.clone(),
                config: Some(ContainerConfig {
                    metadata: Some(Metadata {
                        name: "app".to_owned(),
                        ..Metadata::default()
                    }),
                    image: Some(Image {
                        name: IMAGE.to_owned(),
                    }),
                    command: ["/bin/busybox"]
                        .into_iter()
                        .chain(command.split(' '))
                        .map(str::to_owned)
                        .collect(),
                }),
                pod_config: Some(config),
            },
        )?;
        let Nothing {} = self.call("StartContainer", container.clone())?;
        let status: StatusResponse = self.call(
            "PodSandboxStatus",
            StatusRequest {
                id: id.clone(),
                verbose: true,
            },
        )?;
        let info = status.info.get("info").context("no info of the pod")?;
        let info: serde_json::Value = serde_json::from_str(info)?;
        let namespaces = info["runtimeSpec"]["linux"]["namespaces"].as_array();
        let network = namespaces
            .and_then(|all| all.iter().find(|one| one["type"] == "network"))
            .and_then(|network| network["path"].as_str())
            .context("the pod has no network namespace")?;
        let address = status.status.and_then(|status| status.network);
        Ok(Pod {
            id,
            container: container.id,
            netns: Netns::of_another(Path::new(network))?,
            address: address.context("the pod has no address")?.ip.parse()?,
        })
    }

    /// Ends a pod and removes it.
    pub fn remove(&self, pod: Pod) -> Result<()> {
        let Pod {
            id, container, netns, ..
        } = pod;
        // Nobody there would heed a wish to end.
        signal_container(&container, "SIGKILL")?;
        // Who holds it open keeps it alive.
        drop(netns);
        let Nothing {} = self.call("StopPodSandbox", Id { id: id.clone() })?;
        let Nothing {} = self.call("RemovePodSandbox", Id { id })?;
        Ok(())
    }

    /// Stops what the container of a pod runs.
    pub fn stop(&self, pod: &Pod) -> Result<()> {
        signal_container(&pod.container, "SIGSTOP")
    }

    /// Stops the daemon as if it hung, or lets it go on; what it started goes on anyway.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.child.id())?);
        nix::sys::signal::kill(pid, signal).context("cannot send a signal to containerd")
    }
}

fn signal_container(id: &str, signal: &str) -> Result<()> {
    run(&format!("ctr -n k8s.io tasks kill -s {signal} {id}")).map(drop)
}

/// Lets containers have all controllers.
fn delegate_controllers() -> Result<()> {
    let root = PathBuf::from("/sys/fs/cgroup");
    let controllers = fs::read_to_string(root.join("cgroup.controllers"))?;
    for controller in controllers.split_whitespace() {
        // One that cannot be had is not missed.
        let _ = fs::write(root.join("cgroup.subtree_control"), format!("+{controller}"));
    }
    Ok(())
}

/// The end of what the daemon said.
fn said() -> String {
    let log = fs::read_to_string(Path::new(ROOT).join("log")).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(8)..].join(" | ")
}
