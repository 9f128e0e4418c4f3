//! Runtimes as tests want them: on a Unix socket, well-behaved or not.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    future::{Ready, pending, ready},
    io::{Read as _, Write as _},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use hyper::{body::Incoming, http, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tonic::{
    Response, Status,
    body::Body,
    server::{Grpc, UnaryService},
};
use tonic_prost::ProstCodec;

use super::{
    Reason,
    cri::{
        Client, ContainerEntry, ContainerMetadata, ListContainersRequest, ListContainersResponse,
        ListPodSandboxRequest, ListPodSandboxResponse, PodSandbox, PodSandboxMetadata,
        PodSandboxNetworkStatus, PodSandboxStatus, PodSandboxStatusRequest, PodSandboxStatusResponse,
    },
};

/// What a runtime of the fake kind knows.
#[derive(Clone)]
pub(in crate::context) struct Pods {
    pub(super) sandboxes: Vec<PodSandbox>,
    pub(super) containers: Vec<ContainerEntry>,
    pub(super) status: Arc<dyn Fn(&str) -> PodSandboxStatusResponse + Send + Sync>,
}

impl Pods {
    /// Pods that are up, each by id, namespace, name, and the path of its netns.
    pub(in crate::context) fn at(pods: &[(&str, &str, &str, String)]) -> Self {
        let sandboxes = pods
            .iter()
            .map(|(id, namespace, name, _)| sandbox(id, namespace, name, 0));
        let paths: BTreeMap<String, String> = pods
            .iter()
            .map(|(id, _, _, path)| ((*id).to_owned(), path.clone()))
            .collect();
        Self {
            sandboxes: sandboxes.collect(),
            containers: Vec::new(),
            status: Arc::new(move |id| status_at(paths.get(id).map_or("", String::as_str))),
        }
    }

    /// The same with this address for all.
    pub(in crate::context) fn with_address(mut self, address: &'static str) -> Self {
        let status = self.status.clone();
        self.status = Arc::new(move |id| {
            let mut told = status(id);
            told.status = Some(PodSandboxStatus {
                network: Some(PodSandboxNetworkStatus {
                    ip: address.to_owned(),
                    additional_ips: Vec::new(),
                }),
                linux: None,
            });
            told
        });
        self
    }

    /// Two pods that are up, and one that was stopped, with a container each, of which one runs.
    pub(super) fn two(status: fn(&str) -> PodSandboxStatusResponse) -> Self {
        let container = |id: &str, pod: &str, name: &str, state| ContainerEntry {
            id: id.into(),
            pod_sandbox_id: pod.into(),
            metadata: Some(ContainerMetadata { name: name.into() }),
            state,
        };
        Self {
            sandboxes: vec![
                sandbox("5a1", "default", "web", 0),
                sandbox("5a2", "kube-system", "dns", 0),
                sandbox("5a0", "default", "web", 1),
            ],
            containers: vec![
                container("c01", "5a1", "nginx", 1),
                container("c02", "5a2", "coredns", 2),
            ],
            status: Arc::new(status),
        }
    }
}

fn sandbox(id: &str, namespace: &str, name: &str, state: i32) -> PodSandbox {
    PodSandbox {
        id: id.into(),
        metadata: Some(PodSandboxMetadata {
            name: name.into(),
            uid: format!("uid-of-{name}"),
            namespace: namespace.into(),
        }),
        state,
        labels: [("app".to_owned(), name.to_owned())].into(),
    }
}

/// How a runtime behaves.
#[derive(Clone, Copy)]
pub(in crate::context) enum Behaviour {
    /// As it should.
    Pods(fn() -> Pods),
    /// It knows of two pods and never tells more of them.
    StatusesHang,
    /// It has no such interface.
    Unimplemented,
    /// It accepts, and never answers.
    Silent,
    /// It gives so many bytes of an answer, and ends.
    DiesAfter(usize),
    /// It answers so.
    Rubbish(&'static [u8]),
}

/// A runtime that ends when it is dropped.
pub(in crate::context) struct Fake {
    path: PathBuf,
    folder: Option<tempfile::TempDir>,
    stop: Arc<AtomicBool>,
    statuses: Arc<AtomicUsize>,
    pods: Arc<Mutex<Option<Pods>>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Fake {
    pub(in crate::context) fn path(&self) -> &Path {
        &self.path
    }

    /// Tells of other pods from now on.
    pub(in crate::context) fn set(&self, pods: Pods) {
        *self.pods.lock().unwrap() = Some(pods);
    }

    /// How often the status of a sandbox was asked for.
    pub(super) fn statuses(&self) -> usize {
        self.statuses.load(Ordering::SeqCst)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Wakes whoever waits for a connection.
        let _ = UnixStream::connect(&self.path);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
        drop(self.folder.take());
    }
}

/// A runtime at a path of its own.
pub(in crate::context) fn cri(behaviour: Behaviour) -> Fake {
    let folder = tempfile::tempdir().unwrap();
    let mut fake = cri_at(&folder.path().join("cri.sock"), behaviour);
    fake.folder = Some(folder);
    fake
}

/// A runtime at this path.
pub(super) fn cri_at(path: &Path, behaviour: Behaviour) -> Fake {
    let listener = UnixListener::bind(path).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let statuses = Arc::new(AtomicUsize::new(0));
    let known = Arc::new(Mutex::new(match behaviour {
        Behaviour::Pods(pods) => Some(pods()),
        _ => Some(Pods::two(|_| PodSandboxStatusResponse::default())),
    }));
    let service = Service {
        pods: known.clone(),
        statuses: statuses.clone(),
        offered: !matches!(behaviour, Behaviour::Unimplemented),
        hangs: matches!(behaviour, Behaviour::StatusesHang),
    };
    let thread = thread::spawn({
        let stop = stop.clone();
        move || match behaviour {
            Behaviour::Pods(_) | Behaviour::StatusesHang | Behaviour::Unimplemented => {
                serve(listener, &stop, &service);
            }
            Behaviour::Silent => each(&listener, &stop, |_| true),
            Behaviour::DiesAfter(bytes) => each(&listener, &stop, |stream| {
                // The settings of HTTP/2, and then a piece of a frame.
                let frame = [
                    &[0, 0, 0, 4, 0, 0, 0, 0, 0][..],
                    &[0, 1, 0, 1, 4, 0, 0, 0, 1],
                    &[0; 64],
                ]
                .concat();
                let _ = stream.write_all(&frame[..bytes]);
                false
            }),
            Behaviour::Rubbish(bytes) => each(&listener, &stop, |stream| {
                let _ = stream.write_all(bytes);
                false
            }),
        }
    });
    Fake {
        path: path.to_owned(),
        folder: None,
        stop,
        statuses,
        pods: known,
        thread: Some(thread),
    }
}

/// A server that answers requests for a path; `None` is 404.
pub(super) fn http(answer: fn(&str) -> Option<String>) -> Fake {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("docker.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let thread = thread::spawn({
        let stop = stop.clone();
        move || {
            each(&listener, &stop, |stream| {
                while let Some(asked) = request(stream) {
                    let (status, body) = match answer(&asked) {
                        Some(body) => ("200 OK", body),
                        None => ("404 Not Found", "{}".to_owned()),
                    };
                    let length = body.len();
                    let text = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n{body}");
                    if stream.write_all(text.as_bytes()).is_err() {
                        break;
                    }
                }
                false
            });
        }
    });
    Fake {
        path,
        folder: Some(folder),
        stop,
        statuses: Arc::default(),
        pods: Arc::default(),
        thread: Some(thread),
    }
}

/// The path of the next request; `None` once the client is gone.
fn request(stream: &mut UnixStream) -> Option<String> {
    let mut text = Vec::new();
    let mut byte = [0];
    while !text.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).ok()?;
        text.push(byte[0]);
    }
    let text = String::from_utf8(text).ok()?;
    text.split(' ').nth(1).map(str::to_owned)
}

/// Handles one connection after the other; those for which `handle` says so are kept open.
fn each(listener: &UnixListener, stop: &AtomicBool, mut handle: impl FnMut(&mut UnixStream) -> bool) {
    let mut kept = Vec::new();
    for stream in listener.incoming() {
        if stop.load(Ordering::SeqCst) {
            return;
        }
        let Ok(mut stream) = stream else { continue };
        let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
        if handle(&mut stream) {
            kept.push(stream);
        }
    }
}

fn serve(listener: UnixListener, stop: &AtomicBool, service: &Service) {
    listener.set_nonblocking(true).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let listener = tokio::net::UnixListener::from_std(listener).unwrap();
        let serving = async {
            while let Ok((stream, _)) = listener.accept().await {
                let service = service.clone();
                let answer = service_fn(move |request| service.clone().answer(request));
                let connection = http2::Builder::new(TokioExecutor::new());
                tokio::spawn(connection.serve_connection(TokioIo::new(stream), answer));
            }
        };
        let stopped = async {
            while !stop.load(Ordering::SeqCst) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::select! {
            () = serving => {}
            () = stopped => {}
        }
    });
}

/// The interface, as far as droptrace asks it.
#[derive(Clone)]
struct Service {
    pods: Arc<Mutex<Option<Pods>>>,
    statuses: Arc<AtomicUsize>,
    offered: bool,
    hangs: bool,
}

/// A method of one question and one answer, which is there at once.
struct Method<F>(F);

impl<Q, A, F: FnMut(Q) -> A> UnaryService<Q> for Method<F> {
    type Response = A;
    type Future = Ready<Result<Response<A>, Status>>;

    fn call(&mut self, request: tonic::Request<Q>) -> Self::Future {
        ready(Ok(Response::new((self.0)(request.into_inner()))))
    }
}

impl Service {
    async fn answer(self, request: http::Request<Incoming>) -> Result<http::Response<Body>, Infallible> {
        let path = request.uri().path().to_owned();
        let method = path
            .strip_prefix("/runtime.v1.RuntimeService/")
            .filter(|_| self.offered);
        let pods = self.pods.lock().unwrap().clone();
        let Some(Pods {
            sandboxes,
            containers,
            status,
        }) = pods
        else {
            return Ok(Status::unavailable("no pods").into_http());
        };
        Ok(match method {
            Some("ListPodSandbox") => {
                let answer = move |_: ListPodSandboxRequest| ListPodSandboxResponse {
                    items: sandboxes.clone(),
                };
                Grpc::new(ProstCodec::default())
                    .unary(Method(answer), request)
                    .await
            }
            Some("ListContainers") => {
                let answer = move |_: ListContainersRequest| ListContainersResponse {
                    containers: containers.clone(),
                };
                Grpc::new(ProstCodec::default())
                    .unary(Method(answer), request)
                    .await
            }
            Some("PodSandboxStatus") => {
                self.statuses.fetch_add(1, Ordering::SeqCst);
                if self.hangs {
                    pending::<()>().await;
                }
                let answer = move |asked: PodSandboxStatusRequest| status(&asked.pod_sandbox_id);
                Grpc::new(ProstCodec::default())
                    .unary(Method(answer), request)
                    .await
            }
            _ => Status::unimplemented(format!("unknown: {path}")).into_http(),
        })
    }
}

/// What becomes of a question by a user who may not use the socket; root may use any.
pub(super) fn without_privileges(socket: &Path) -> (Reason, Duration) {
    /// `nobody`.
    const NOBODY: libc::uid_t = 65_534;
    let socket = socket.to_owned();
    let asked = thread::spawn(move || {
        // SAFETY: changes the user by whom this thread, which ends soon, opens files.
        unsafe { libc::setfsuid(NOBODY) };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let started = std::time::Instant::now();
        let refusal = runtime.block_on(async { Client::new(&socket).ask().await.unwrap_err() });
        (refusal.reason, started.elapsed())
    });
    asked.join().unwrap()
}

/// A sandbox in the network namespace of the tests.
pub(super) fn status_here() -> PodSandboxStatusResponse {
    status_at("/proc/self/ns/net")
}

fn status_at(path: &str) -> PodSandboxStatusResponse {
    let info =
        format!(r#"{{"runtimeSpec":{{"linux":{{"namespaces":[{{"type":"network","path":"{path}"}}]}}}}}}"#);
    PodSandboxStatusResponse {
        info: [("info".to_owned(), info)].into(),
        ..PodSandboxStatusResponse::default()
    }
}
