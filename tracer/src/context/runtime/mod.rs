//! Who runs here: pods and containers, and the network namespace of each, as
//! the container runtime tells.
//!
//! Asked are the Container Runtime Interface (containerd, CRI-O, cri-dockerd) and
//! Docker's API, both over a Unix socket of this host. A round of questions ends
//! within [`PATIENCE`], whatever the other side does; what came by then counts.

mod choice;
mod cri;
mod docker;
#[cfg(test)]
pub(super) mod fake;
mod names;
mod resolver;

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    net::IpAddr,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use choice::{Choice, Unmet};
pub use choice::{Labels, PodRequest};
pub(crate) use names::{Named, Names};
pub(crate) use resolver::{PodError, Resolver};

/// A runtime has this long for all questions of a round: whoever waits for it is told within two seconds.
pub(crate) const PATIENCE: Duration = Duration::from_millis(1_500);
/// Where runtimes listen that speak the Container Runtime Interface.
const CRI_SOCKETS: [&str; 4] = [
    "/run/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/run/cri-dockerd.sock",
    "/run/k3s/containerd/containerd.sock",
];
/// Where Docker listens.
const DOCKER_SOCKET: &str = "/run/docker.sock";

/// A network namespace, and a path to open it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Inode number.
    pub(crate) inode: u32,
    /// A path that leads to it.
    pub(crate) path: PathBuf,
}

/// A pod that is up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pod {
    /// Id of its sandbox: a pod that restarts has another one.
    pub(crate) id: String,
    /// Namespace, in the sense of Kubernetes.
    pub(crate) namespace: String,
    /// Name in that namespace.
    pub(crate) name: String,
    /// Uid, as the API server knows it.
    pub(crate) uid: String,
    /// Labels.
    pub(crate) labels: BTreeMap<String, String>,
    /// Its network namespace; `None` where the runtime does not tell, or does not yet.
    pub(crate) place: Option<Place>,
    /// It has no network namespace of its own, but that of the host.
    pub(crate) host_network: bool,
    /// Its addresses; none where it has the host's.
    pub(crate) addresses: Vec<IpAddr>,
    /// Pid of the process that holds the sandbox.
    pub(crate) pid: Option<u32>,
    /// Device on the host's side.
    pub(crate) interface: Option<String>,
}

impl Pod {
    /// Namespace and name as one word.
    pub(crate) fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// A container that was started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Container {
    /// Id.
    pub(crate) id: String,
    /// Name: within its pod, else on this host.
    pub(crate) name: String,
    /// Id of its pod's sandbox, where it belongs to a pod.
    pub(crate) pod: Option<String>,
    /// Its network namespace, where it belongs to no pod.
    pub(crate) place: Option<Place>,
    /// That was made for another container.
    pub(crate) shares: bool,
    /// It has no network namespace of its own, but that of the host.
    pub(crate) host_network: bool,
    /// Its addresses, where it belongs to no pod.
    pub(crate) addresses: Vec<IpAddr>,
}

/// All pods and containers that are up, in the order of their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Inventory {
    /// Pods.
    pub(crate) pods: Vec<Pod>,
    /// Containers, those of pods included.
    pub(crate) containers: Vec<Container>,
}

impl Inventory {
    /// The pod of a sandbox.
    pub(crate) fn pod(&self, id: &str) -> Option<&Pod> {
        self.pods.iter().find(|pod| pod.id == id)
    }

    /// Takes in what another runtime tells. Docker runs the containers of pods, too, where cri-dockerd tells of those.
    fn join(&mut self, other: Self) {
        let known = |inventory: &Self, id: &str| {
            inventory.pod(id).is_some() || inventory.containers.iter().any(|container| container.id == id)
        };
        let pods = other
            .pods
            .into_iter()
            .filter(|pod| !known(self, &pod.id))
            .collect::<Vec<_>>();
        let containers = other.containers.into_iter();
        let containers = containers
            .filter(|container| !known(self, &container.id))
            .collect::<Vec<_>>();
        self.pods.extend(pods);
        self.containers.extend(containers);
    }

    /// Forgets the places that are there no more: another's may have the same number by now.
    fn forget_places(&mut self) {
        let pods = self.pods.iter_mut().map(|pod| &mut pod.place);
        let containers = self.containers.iter_mut().map(|container| &mut container.place);
        for place in pods.chain(containers) {
            *place = place.take().filter(Place::holds);
        }
    }

    fn sort(&mut self) {
        self.pods
            .sort_by(|a, b| (&a.namespace, &a.name, &a.id).cmp(&(&b.namespace, &b.name, &b.id)));
        self.containers
            .sort_by(|a, b| (&a.name, &a.id).cmp(&(&b.name, &b.id)));
    }
}

/// Why a runtime did not tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// Its socket; empty where there is none.
    pub(crate) socket: PathBuf,
    /// What became of the question.
    pub(crate) reason: Reason,
}

/// What became of a question to a runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// Nothing listens on a path that runtimes use.
    NoSocket,
    /// The system refused the connection.
    Connect(io::ErrorKind, String),
    /// No answer within [`PATIENCE`].
    Silent,
    /// It speaks this protocol, but not of pods: as a containerd without its CRI plugin.
    NotOffered,
    /// It broke off, refused, or said what makes no sense.
    Failed(String),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let socket = self.socket.display();
        match &self.reason {
            Reason::NoSocket => write!(
                f,
                "no container runtime listens here (tried {}, {DOCKER_SOCKET})",
                CRI_SOCKETS.join(", ")
            ),
            Reason::Connect(io::ErrorKind::PermissionDenied, _) => {
                write!(f, "{socket} may be used by root only: permission denied")
            }
            Reason::Connect(_, text) => write!(f, "cannot connect to {socket}: {text}"),
            Reason::Silent => write!(f, "{socket} does not answer: waited {} s", PATIENCE.as_secs_f32()),
            Reason::NotOffered => write!(f, "{socket} does not offer the Container Runtime Interface"),
            Reason::Failed(text) => write!(f, "{socket} does not tell of pods: {text}"),
        }
    }
}

impl Reason {
    fn connect(error: &io::Error) -> Self {
        Self::Connect(error.kind(), error.to_string())
    }
}

/// A runtime, and what it told last.
struct Runtime {
    client: Client,
    last: Option<Inventory>,
}

/// How a runtime is asked.
enum Client {
    Cri(cri::Client),
    Docker(docker::Client),
}

impl Runtime {
    fn cri(socket: &Path) -> Self {
        Self {
            client: Client::Cri(cri::Client::new(socket)),
            last: None,
        }
    }

    fn docker(socket: &Path) -> Self {
        Self {
            client: Client::Docker(docker::Client::new(socket)),
            last: None,
        }
    }

    /// What it tells, else what it told before, as far as that still holds; and why it did not tell.
    async fn ask(&mut self) -> (Option<Inventory>, Option<Refusal>) {
        let told = match &mut self.client {
            Client::Cri(client) => client.ask().await,
            Client::Docker(client) => client.ask().await,
        };
        let refusal = match told {
            Ok(told) => {
                self.last = Some(told);
                None
            }
            Err(refusal) => {
                self.last.iter_mut().for_each(Inventory::forget_places);
                Some(refusal)
            }
        };
        (self.last.clone(), refusal)
    }
}

/// The runtimes of this host.
pub(crate) struct Runtimes(Vec<Runtime>);

impl Runtimes {
    /// Those whose sockets are there; with `socket`, that one alone.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn find(socket: Option<&Path>) -> Result<Self, Refusal> {
        if let Some(socket) = socket {
            return match fs::metadata(socket) {
                Ok(_) => Ok(Self(vec![Runtime::cri(socket)])),
                Err(error) => Err(Refusal {
                    socket: socket.to_owned(),
                    reason: Reason::connect(&error),
                }),
            };
        }
        let present = |path: &&str| is_socket(Path::new(path));
        let cri = CRI_SOCKETS.iter().copied().filter(present);
        let docker = [DOCKER_SOCKET].into_iter().filter(present);
        let found: Vec<Runtime> = cri
            .map(|path| Runtime::cri(Path::new(path)))
            .chain(docker.map(|path| Runtime::docker(Path::new(path))))
            .collect();
        if found.is_empty() {
            return Err(Refusal {
                socket: PathBuf::new(),
                reason: Reason::NoSocket,
            });
        }
        Ok(Self(found))
    }

    /// Asks all of them, within [`PATIENCE`]: who runs here, and which of them did not tell; `None` where none ever did.
    pub(crate) async fn ask(&mut self) -> (Option<Inventory>, Vec<Refusal>) {
        let asked = futures_util::future::join_all(self.0.iter_mut().map(Runtime::ask)).await;
        let mut inventory: Option<Inventory> = None;
        let mut refusals = Vec::new();
        for (told, refusal) in asked {
            if let Some(told) = told {
                inventory.get_or_insert_default().join(told);
            }
            refusals.extend(refusal);
        }
        if let Some(inventory) = &mut inventory {
            inventory.sort();
        }
        (inventory, refusals)
    }
}

fn is_socket(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

impl Place {
    /// The network namespace at the first of these paths that leads to one.
    fn first(paths: impl IntoIterator<Item = PathBuf>) -> Option<Self> {
        paths.into_iter().find_map(|path| {
            let (_, inode) = super::netns::open(&path).ok()?;
            Some(Self { inode, path })
        })
    }

    /// That of the host.
    fn of_host() -> Option<Self> {
        Self::first(["/proc/1/ns/net".into()])
    }

    /// Whether the path still leads there: that of a process may be another's by now.
    fn holds(&self) -> bool {
        super::netns::open(&self.path).is_ok_and(|(_, inode)| inode == self.inode)
    }
}

/// Whether the netns is that of the host.
fn is_of_host(place: &Place) -> bool {
    fs::metadata("/proc/1/ns/net").is_ok_and(|host| host.ino() == u64::from(place.inode))
}

fn netns_of(pid: Option<u32>) -> Option<PathBuf> {
    pid.filter(|&pid| pid > 0)
        .map(|pid| PathBuf::from(format!("/proc/{pid}/ns/net")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_two_runtimes_tell_is_told_once() {
        let container = |id: &str| Container {
            id: id.into(),
            name: id.into(),
            ..Container::default()
        };
        let mut inventory = Inventory {
            pods: vec![Pod {
                id: "sandbox".into(),
                ..Pod::default()
            }],
            containers: vec![container("a")],
        };
        inventory.join(Inventory {
            pods: Vec::new(),
            containers: vec![container("sandbox"), container("a"), container("b")],
        });
        let ids: Vec<_> = inventory.containers.iter().map(|each| each.id.as_str()).collect();
        assert_eq!(ids, ["a", "b"]);
    }

    #[test]
    fn a_socket_that_is_not_there_is_told_at_once() {
        let Err(refusal) = Runtimes::find(Some(Path::new("/no/such.sock"))) else {
            panic!("found what is not there");
        };
        assert_eq!(
            refusal.to_string(),
            "cannot connect to /no/such.sock: No such file or directory (os error 2)"
        );
    }
}
