//! Containers by Docker's API, which is HTTP over a Unix socket.
//!
//! Read are `GET /containers/json` and `GET /containers/ID/json`, in the version
//! of the API that the daemon takes for its own.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    path::{Path, PathBuf},
};

use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{
    Request, StatusCode,
    body::Bytes,
    client::conn::http1::{SendRequest, handshake},
    header::HOST,
};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, de::DeserializeOwned};
use tokio::{
    net::UnixStream,
    task::JoinHandle,
    time::{Instant, timeout_at},
};

use super::{Container, Inventory, PATIENCE, Place, Reason, Refusal, netns_of};

/// Largest answer that is taken, in bytes.
const ANSWER_MAX: usize = 64 << 20;
/// A container that shares the network namespace of another one names it so.
const OF_CONTAINER: &str = "container:";
/// A container in the network namespace of the host.
const HOST_MODE: &str = "host";

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Listed {
    id: String,
    names: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Inspected {
    state: State,
    host_config: HostConfig,
    network_settings: NetworkSettings,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct State {
    pid: u32,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct HostConfig {
    network_mode: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct NetworkSettings {
    /// Path of the network namespace.
    sandbox_key: String,
    networks: Option<BTreeMap<String, Option<Network>>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Network {
    #[serde(rename = "IPAddress")]
    address: String,
    #[serde(rename = "GlobalIPv6Address")]
    address_v6: String,
}

/// What is asked about a container once, since it stays while its network namespace does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Details {
    place: Option<Place>,
    /// `host`, `container:ID`, or the name of a network.
    mode: String,
    addresses: Vec<IpAddr>,
}

/// A Docker daemon.
pub(super) struct Client {
    socket: PathBuf,
    details: BTreeMap<String, Details>,
}

impl Client {
    pub(super) fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
            details: BTreeMap::new(),
        }
    }

    /// Which containers run here, within [`PATIENCE`].
    ///
    /// # Errors
    /// They could not be listed. One that alone could not be asked about is listed without a place.
    pub(super) async fn ask(&mut self) -> Result<Inventory, Refusal> {
        let deadline = Instant::now() + PATIENCE;
        let listed = async {
            let mut connection = Connection::open(&self.socket).await?;
            let listed: Vec<Listed> = connection.get("/containers/json").await?;
            Ok((connection, listed))
        };
        let answer = match timeout_at(deadline, listed).await {
            Ok(answer) => answer,
            Err(_) => Err(Reason::Silent),
        };
        let (connection, listed) = answer.map_err(|reason| Refusal {
            socket: self.socket.clone(),
            reason,
        })?;
        self.look_at_new(connection, &listed, deadline).await;
        Ok(self.inventory(&listed))
    }

    async fn look_at_new(&mut self, mut connection: Connection, listed: &[Listed], deadline: Instant) {
        self.details.retain(|id, details| {
            listed.iter().any(|each| each.id == *id) && details.place.as_ref().is_some_and(Place::holds)
        });
        for Listed { id, .. } in listed {
            if self.details.contains_key(id) {
                continue;
            }
            let path = format!("/containers/{id}/json");
            match timeout_at(deadline, connection.get::<Inspected>(&path)).await {
                Ok(Ok(inspected)) => {
                    self.details.insert(id.clone(), details(inspected));
                }
                // Gone meanwhile.
                Ok(Err(Reason::NotOffered)) => {}
                Ok(Err(_)) | Err(_) => return,
            }
        }
    }

    fn inventory(&self, listed: &[Listed]) -> Inventory {
        let containers = listed.iter().map(|each| {
            let details = self.details.get(&each.id).cloned().unwrap_or_default();
            Container {
                id: each.id.clone(),
                name: each
                    .names
                    .first()
                    .map_or("", |name| name.trim_start_matches('/'))
                    .to_owned(),
                pod: None,
                place: details.place,
                shares: details.mode.starts_with(OF_CONTAINER),
                host_network: details.mode == HOST_MODE,
                // Those of a shared namespace are the other one's.
                addresses: details.addresses,
            }
        });
        Inventory {
            pods: Vec::new(),
            containers: containers.collect(),
        }
    }
}

fn details(inspected: Inspected) -> Details {
    let mode = inspected.host_config.network_mode;
    let settings = inspected.network_settings;
    let networks = settings.networks.unwrap_or_default();
    let addresses = networks
        .values()
        .flatten()
        .flat_map(|network| [&network.address, &network.address_v6])
        .filter_map(|address| address.parse().ok());
    let place = if mode == HOST_MODE {
        Place::of_host()
    } else if mode.starts_with(OF_CONTAINER) {
        // Where it was put when it was started: the other one may have been started anew since.
        Place::first(netns_of(Some(inspected.state.pid)))
    } else {
        let named = Some(settings.sandbox_key).filter(|path| !path.is_empty());
        Place::first(named.map(PathBuf::from))
    };
    Details {
        place,
        addresses: addresses.collect(),
        mode,
    }
}

/// A connection for several requests, one after the other.
struct Connection {
    sender: SendRequest<Empty<Bytes>>,
    driver: JoinHandle<()>,
}

impl Connection {
    async fn open(socket: &Path) -> Result<Self, Reason> {
        let stream = UnixStream::connect(socket)
            .await
            .map_err(|error| Reason::connect(&error))?;
        let (sender, connection) = handshake(TokioIo::new(stream))
            .await
            .map_err(|error| Reason::Failed(error.to_string()))?;
        let driver = tokio::spawn(async move {
            // What goes wrong is told to whoever asks.
            let _ = connection.await;
        });
        Ok(Self { sender, driver })
    }

    async fn get<A: DeserializeOwned>(&mut self, path: &str) -> Result<A, Reason> {
        let failed = |error: &dyn std::fmt::Display| Reason::Failed(format!("GET {path}: {error}"));
        self.sender.ready().await.map_err(|error| failed(&error))?;
        let request = Request::get(path)
            .header(HOST, "localhost")
            .body(Empty::new())
            .map_err(|error| failed(&error))?;
        let answer = self
            .sender
            .send_request(request)
            .await
            .map_err(|error| failed(&error))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_MAX)
            .collect()
            .await
            .map_err(|error| failed(&error))?
            .to_bytes();
        match status {
            StatusCode::OK => serde_json::from_slice(&body).map_err(|error| failed(&error)),
            StatusCode::NOT_FOUND => Err(Reason::NotOffered),
            _ => Err(failed(&status)),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::{super::fake, *};

    const LIST: &str = r#"[{"Id":"aa11","Names":["/web"],"State":"running","Labels":{}},
        {"Id":"bb22","Names":["/side"],"State":"running"},{"Id":"cc33","Names":["/agent"],"State":"running"}]"#;

    fn answer(path: &str) -> Option<String> {
        let inspected = |mode: &str, key: &str, address: &str| {
            format!(
                r#"{{"State":{{"Pid":{}}},"HostConfig":{{"NetworkMode":"{mode}"}},"NetworkSettings":{{"SandboxKey":"{key}",
                "IPAddress":"","Networks":{{"front":{{"IPAddress":"{address}","GlobalIPv6Address":""}},"none":null}}}}}}"#,
                std::process::id()
            )
        };
        match path {
            "/containers/json" => Some(LIST.to_owned()),
            "/containers/aa11/json" => Some(inspected("front", "/proc/self/ns/net", "172.18.0.2")),
            "/containers/bb22/json" => Some(inspected("container:aa11", "", "")),
            "/containers/cc33/json" => Some(inspected("host", "", "")),
            _ => None,
        }
    }

    #[tokio::test]
    async fn containers_are_told() {
        let server = fake::http(answer);
        let mut client = Client::new(server.path());
        let inventory = client.ask().await.unwrap();
        let inode = |place: Option<Place>| place.map(|place| place.inode);
        let own = inode(Place::first(["/proc/self/ns/net".into()]));
        assert!(own.is_some());
        let found: Vec<_> = inventory
            .containers
            .iter()
            .map(|each| {
                (
                    each.name.as_str(),
                    each.place.as_ref().map(|place| place.inode),
                    each.shares,
                    each.host_network,
                    each.addresses.len(),
                )
            })
            .collect();
        assert_eq!(
            found,
            [
                ("web", own, false, false, 1),
                ("side", own, true, false, 0),
                ("agent", inode(Place::of_host()), false, true, 0)
            ]
        );
        assert_eq!(client.ask().await.unwrap(), inventory);
    }

    #[tokio::test]
    async fn one_that_never_answers_is_given_up() {
        let server = fake::cri(fake::Behaviour::Silent);
        let started = std::time::Instant::now();
        let refusal = Client::new(server.path()).ask().await.unwrap_err();
        assert_eq!(refusal.reason, Reason::Silent);
        assert!(started.elapsed() < std::time::Duration::from_secs(2));
    }

    #[tokio::test]
    async fn what_is_no_answer_is_refused() {
        for answer in [
            &b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[{\"Id\":1}"[..],
            b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n[",
            b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
            &[0xff; 512],
        ] {
            let server = fake::cri(fake::Behaviour::Rubbish(answer));
            let refusal = Client::new(server.path()).ask().await.unwrap_err();
            assert!(matches!(refusal.reason, Reason::Failed(_)), "{refusal:?}");
        }
    }
}
