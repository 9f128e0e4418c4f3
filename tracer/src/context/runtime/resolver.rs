//! The thread that asks the runtimes, again and again, so that nobody else
//! waits for them.

use std::{
    collections::BTreeMap,
    fmt, io,
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread::JoinHandle,
    time::Duration,
};

use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::sync::Notify;

use super::{Choice, Inventory, PodRequest, Reason, Refusal, Runtimes, Unmet};

/// Runtimes are asked this often where pods are followed: a new one is in scope within a second.
const FOLLOW_EVERY: Duration = Duration::from_millis(500);
/// And this often where only names are wanted.
const NAMES_EVERY: Duration = Duration::from_secs(2);

/// Why pods could not be found at the start.
#[derive(Debug)]
pub(crate) enum PodError {
    /// No runtime told anything.
    Refused(Vec<Refusal>),
    /// What the user named is not here; some runtimes may not have told.
    Unmet(Unmet, Vec<Refusal>),
    /// A thread or descriptor could not be had.
    Start(io::Error),
}

impl fmt::Display for PodError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts = |refusals: &[Refusal]| {
            let texts: Vec<String> = refusals.iter().map(ToString::to_string).collect();
            texts.join("; ")
        };
        match self {
            Self::Refused(refusals) => f.write_str(&texts(refusals)),
            Self::Unmet(unmet, refusals) if refusals.is_empty() => write!(f, "{unmet}"),
            Self::Unmet(unmet, refusals) => write!(f, "{unmet} (and {})", texts(refusals)),
            Self::Start(error) => write!(f, "cannot ask for pods: {error}"),
        }
    }
}

/// What was told last.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told {
    /// Who runs here.
    pub(crate) inventory: Arc<Inventory>,
    /// Network namespaces of those whom the user named.
    pub(crate) places: BTreeMap<u32, PathBuf>,
    /// What bears on how far the rest can be trusted: subject → reason.
    pub(crate) problems: BTreeMap<String, String>,
}

/// What the thread shares with those who use it.
#[derive(Debug)]
struct Shared {
    told: Mutex<Told>,
    news: EventFd,
    stop: Notify,
}

impl Shared {
    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Knows who runs here. With it the thread ends.
#[derive(Debug)]
pub(crate) struct Resolver {
    shared: Arc<Shared>,
    follows: bool,
    thread: Option<JoinHandle<()>>,
}

impl Resolver {
    /// Finds what the user named, and follows it. Where nothing was named and a runtime is there, names come later,
    /// and nobody waits for them; `None`: there is no runtime.
    ///
    /// # Errors
    /// What was named cannot be found; told within two seconds.
    pub(crate) fn start(request: &PodRequest) -> Result<Option<Self>, PodError> {
        let follows = !request.is_empty();
        let runtimes = match Runtimes::find(request.socket.as_deref()) {
            Ok(runtimes) => runtimes,
            Err(_) if !follows && request.socket.is_none() => return Ok(None),
            Err(refusal) => return Err(PodError::Refused(vec![refusal])),
        };
        let news = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| PodError::Start(errno.into()))?;
        let shared = Arc::new(Shared {
            told: Mutex::default(),
            news,
            stop: Notify::new(),
        });
        let (tell_first, first) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("droptrace-pods".to_owned())
            .spawn({
                let (shared, request) = (shared.clone(), request.clone());
                move || {
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                    match runtime {
                        Ok(runtime) => runtime.block_on(ask_on(runtimes, &request, &shared, &tell_first)),
                        Err(error) => {
                            // Who does not wait for it does without names.
                            let _ = tell_first.send(Err(PodError::Start(error)));
                        }
                    }
                }
            })
            .map_err(PodError::Start)?;
        let resolver = Self {
            shared,
            follows,
            thread: Some(thread),
        };
        if follows {
            let ended = || PodError::Start(io::Error::other("its thread ended"));
            first.recv().unwrap_or_else(|_| Err(ended()))?;
        }
        Ok(Some(resolver))
    }

    /// Whether it follows what the user named; else it knows names only.
    pub(crate) const fn follows(&self) -> bool {
        self.follows
    }

    /// Readable when there is something new.
    pub(crate) fn news(&self) -> BorrowedFd<'_> {
        self.shared.news.as_fd()
    }

    /// Takes the news.
    pub(crate) fn told(&self) -> Told {
        // Only clears the counter.
        let _ = self.shared.news.read();
        self.shared.told().clone()
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        self.shared.stop.notify_one();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

/// Asks until it is told to stop, or what was named is not found in the first round.
async fn ask_on(
    mut runtimes: Runtimes,
    request: &PodRequest,
    shared: &Shared,
    tell_first: &mpsc::Sender<Result<(), PodError>>,
) {
    let follows = !request.is_empty();
    let every = if follows { FOLLOW_EVERY } else { NAMES_EVERY };
    let mut choice = None;
    loop {
        let (told, refusals) = tokio::select! {
            asked = runtimes.ask() => asked,
            () = shared.stop.notified() => return,
        };
        let choice = match &choice {
            Some(choice) => choice,
            None => match first_choice(request, told.as_ref(), &refusals) {
                Ok(found) => choice.insert(found),
                Err(error) => {
                    let _ = tell_first.send(Err(error));
                    return;
                }
            },
        };
        take(shared, choice, told, &refusals, follows);
        // Nobody waits for the second one.
        let _ = tell_first.send(Ok(()));
        tokio::select! {
            () = tokio::time::sleep(every) => {}
            () = shared.stop.notified() => return,
        }
    }
}

fn first_choice(
    request: &PodRequest,
    told: Option<&Inventory>,
    refusals: &[Refusal],
) -> Result<Choice, PodError> {
    match told {
        Some(told) => Choice::of(request, told)
            .map_err(|unmet| PodError::Unmet(unmet, faults(refusals).cloned().collect())),
        None if request.is_empty() => Ok(Choice::default()),
        None => Err(PodError::Refused(refusals.to_vec())),
    }
}

/// What is wrong where another runtime told: a containerd that serves Docker alone is none to ask for pods.
fn faults(refusals: &[Refusal]) -> impl Iterator<Item = &Refusal> {
    refusals
        .iter()
        .filter(|refusal| refusal.reason != Reason::NotOffered)
}

/// Keeps what is new. Where no runtime told anything, what was told before stays.
fn take(shared: &Shared, choice: &Choice, told: Option<Inventory>, refusals: &[Refusal], follows: bool) {
    let mut held = shared.told();
    let mut problems: BTreeMap<String, String> = faults(refusals)
        .map(|refusal| {
            let subject = format!("container runtime {}", refusal.socket.display());
            let effect = if follows {
                "pods that start are not followed, and have no names, until it answers"
            } else {
                "pods and containers have no names until it answers"
            };
            (subject, format!("{refusal}; {effect}"))
        })
        .collect();
    let inventory = match told {
        Some(told) if told != *held.inventory => Arc::new(told),
        _ => held.inventory.clone(),
    };
    for name in choice.in_host_network(&inventory) {
        problems.insert(
            format!("pod {name}"),
            "it has the network namespace of the host, so the whole of that is in scope".to_owned(),
        );
    }
    let places = choice.places(&inventory);
    let changed =
        !Arc::ptr_eq(&inventory, &held.inventory) || places != held.places || problems != held.problems;
    *held = Told {
        inventory,
        places,
        problems,
    };
    drop(held);
    if changed {
        // A full counter wakes as well.
        let _ = shared.news.write(1);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::{
        super::fake::{self, Behaviour, Pods},
        *,
    };

    fn request(socket: &std::path::Path, pod: &str) -> PodRequest {
        PodRequest {
            pods: vec![pod.parse().unwrap()],
            socket: Some(socket.to_owned()),
            ..PodRequest::default()
        }
    }

    fn error(socket: &std::path::Path, pod: &str) -> String {
        let started = Instant::now();
        let error = Resolver::start(&request(socket, pod)).unwrap_err().to_string();
        assert!(
            started.elapsed() < Duration::from_secs(2),
            "{:?}",
            started.elapsed()
        );
        error
    }

    #[test]
    fn what_is_wrong_is_told_within_two_seconds() {
        let good = fake::cri(Behaviour::Pods(|| Pods::two(|_| fake::status_here())));
        assert_eq!(
            error(good.path(), "default/db"),
            "pod default/db is not on this host; up are default/web, kube-system/dns"
        );
        let silent = fake::cri(Behaviour::Silent);
        assert!(error(silent.path(), "default/web").ends_with("does not answer: waited 1.5 s"));
        let none = fake::cri(Behaviour::Unimplemented);
        assert!(error(none.path(), "web").ends_with("does not offer the Container Runtime Interface"));
        let dead = fake::cri(Behaviour::DiesAfter(20));
        assert!(error(dead.path(), "web").contains("does not tell of pods: "));
        assert!(
            error(std::path::Path::new("/no/such.sock"), "web").contains("cannot connect to /no/such.sock")
        );
        let hangs = fake::cri(Behaviour::StatusesHang);
        assert!(error(hangs.path(), "default/web").contains("does not tell its network namespace"));
    }

    #[test]
    fn a_containerd_that_serves_docker_alone_is_no_fault() {
        let refusal = |reason| Refusal {
            socket: "/run/containerd/containerd.sock".into(),
            reason,
        };
        let refusals = [refusal(Reason::NotOffered), refusal(Reason::Silent)];
        assert_eq!(faults(&refusals).collect::<Vec<_>>(), [&refusals[1]]);
        let named = PodRequest {
            containers: vec!["redis".to_owned()],
            ..PodRequest::default()
        };
        let error = first_choice(&named, Some(&Inventory::default()), &refusals[..1]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "container redis is not on this host: its container runtime knows of none that is up"
        );
        let error = first_choice(&named, None, &refusals[..1]).unwrap_err();
        assert!(
            error
                .to_string()
                .ends_with("does not offer the Container Runtime Interface")
        );
    }

    #[test]
    fn what_is_named_is_found_and_kept_while_the_runtime_is_away() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cri.sock");
        let server = fake::cri_at(&path, Behaviour::Pods(|| Pods::two(|_| fake::status_here())));
        let resolver = Resolver::start(&request(&path, "default/web")).unwrap().unwrap();
        let told = resolver.told();
        let own = super::super::Place::first(["/proc/self/ns/net".into()]).unwrap();
        assert_eq!(told.places.keys().copied().collect::<Vec<_>>(), [own.inode]);
        drop(server);
        let until = Instant::now() + Duration::from_secs(5);
        let problems = loop {
            let now = resolver.told();
            assert_eq!(now.places, told.places);
            if now
                .problems
                .keys()
                .any(|subject| subject.starts_with("container runtime"))
            {
                break now.problems;
            }
            assert!(Instant::now() < until, "nobody says that the runtime is away");
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(
            problems.values().any(|text| text.contains("not followed")),
            "{problems:?}"
        );
    }
}
