//! One look at the pods and containers of this host: where they are, what the
//! kernel counted there, and which listeners are near their limit.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    path::Path,
};

use serde::Serialize;

use super::{
    ContextError,
    runtime::{Inventory, PodError, Runtimes},
    survey::{Listening, Survey, survey},
};
use crate::diagnose::WITNESSES;

/// A listener is near its limit where its queue is filled to this part: three of four.
const NEAR: (u64, u64) = (3, 4);

/// What one look found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Picture {
    /// Pods, and containers outside of any.
    pub pods: Vec<PodState>,
    /// What could not be found out, and why.
    pub problems: Vec<String>,
}

/// A pod, or a container outside of any.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PodState {
    /// `NAMESPACE/NAME`; null for a container outside of any pod.
    pub pod: Option<String>,
    /// Uid of the pod.
    pub uid: Option<String>,
    /// Labels of the pod.
    pub labels: BTreeMap<String, String>,
    /// Names of its containers that run.
    pub containers: Vec<String>,
    /// Inode of its netns; null where the runtime does not tell.
    pub netns: Option<u32>,
    /// It has the netns of the host.
    pub host_network: bool,
    /// Its addresses; none where they are the host's.
    pub addresses: Vec<IpAddr>,
    /// Device on the host's side.
    pub interface: Option<String>,
    /// Kernel counters of lost packets in its netns that are not 0, since the netns was made. One packet may be in two of
    /// them. Empty where the netns is the host's.
    pub counters: BTreeMap<String, u64>,
    /// Listeners whose accept queue is filled to three quarters or more. Empty where the netns is the host's.
    pub listeners_near_limit: Vec<Listening>,
}

/// Asks the runtimes, or the one at this socket, and looks at each netns.
///
/// # Errors
/// No runtime tells who runs here; told within two seconds, and the text names the next step.
pub fn picture(socket: Option<&Path>) -> Result<Picture, ContextError> {
    let refused = |refusals| ContextError::Runtime(PodError::Refused(refusals).to_string());
    let mut runtimes = Runtimes::find(socket).map_err(|refusal| refused(vec![refusal]))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(ContextError::Start)?;
    let (inventory, refusals) = runtime.block_on(runtimes.ask());
    let Some(inventory) = inventory else {
        return Err(refused(refusals));
    };
    let mut problems: Vec<String> = refusals.iter().map(ToString::to_string).collect();
    let surveys = survey().unwrap_or_else(|error: io::Error| {
        problems.push(format!("no netns could be looked at: {error}"));
        Vec::new()
    });
    let mut pods = states(&inventory);
    for pod in pods.iter_mut().filter(|pod| !pod.host_network) {
        if let Some(found) = surveys.iter().find(|survey| Some(survey.netns) == pod.netns) {
            fill(pod, found);
        }
    }
    let seen: BTreeSet<u32> = pods.iter().filter_map(|pod| pod.netns).collect();
    let of_pods = surveys.into_iter().filter(|survey| seen.contains(&survey.netns));
    problems.extend(of_pods.flat_map(|survey| {
        let netns = survey.netns;
        survey
            .problems
            .into_iter()
            .map(move |problem| format!("netns {netns}: {problem}"))
    }));
    Ok(Picture { pods, problems })
}

/// As the runtimes tell them.
fn states(inventory: &Inventory) -> Vec<PodState> {
    let pods = inventory.pods.iter().map(|pod| {
        let is_of = |id: &Option<String>| id.as_ref() == Some(&pod.id);
        let containers = inventory
            .containers
            .iter()
            .filter(|container| is_of(&container.pod));
        PodState {
            pod: Some(pod.full_name()),
            uid: Some(pod.uid.clone()),
            labels: pod.labels.clone(),
            containers: containers.map(|container| container.name.clone()).collect(),
            netns: pod.place.as_ref().map(|place| place.inode),
            host_network: pod.host_network,
            addresses: pod.addresses.clone(),
            interface: pod.interface.clone(),
            ..PodState::default()
        }
    });
    let alone = inventory
        .containers
        .iter()
        .filter(|container| container.pod.is_none());
    let alone = alone.map(|container| PodState {
        containers: vec![container.name.clone()],
        netns: container.place.as_ref().map(|place| place.inode),
        host_network: container.host_network,
        addresses: container.addresses.clone(),
        ..PodState::default()
    });
    pods.chain(alone).collect()
}

fn fill(pod: &mut PodState, survey: &Survey) {
    let of_losses: BTreeSet<&str> = WITNESSES
        .iter()
        .flat_map(|witness| witness.counters.iter().copied())
        .collect();
    let counted = survey
        .counters
        .iter()
        .filter(|(name, value)| **value > 0 && of_losses.contains(*name));
    pod.counters = counted
        .map(|(name, value)| ((*name).to_owned(), *value))
        .collect();
    let near = survey.listeners.iter().filter(|each| is_near(each));
    pod.listeners_near_limit = near.cloned().collect();
}

fn is_near(listener: &Listening) -> bool {
    let (length, limit) = (u64::from(listener.queue_length), u64::from(listener.queue_limit));
    length > 0 && length * NEAR.1 >= limit * NEAR.0
}

#[cfg(test)]
mod tests {
    use super::{super::runtime::fake, *};

    #[test]
    fn pods_are_listed_with_what_is_theirs() {
        let server = fake::cri(fake::Behaviour::Pods(|| {
            fake::Pods::at(&[("1", "default", "web", "/proc/self/ns/net".to_owned())])
                .with_address("192.0.2.80")
        }));
        let found = picture(Some(server.path())).unwrap();
        assert_eq!(found.pods.len(), 1);
        let pod = &found.pods[0];
        assert_eq!(pod.pod.as_deref(), Some("default/web"));
        assert_eq!(
            pod.netns,
            Some(super::super::resolve("/proc/self/ns/net").unwrap().inode)
        );
        assert_eq!(pod.addresses, ["192.0.2.80".parse::<IpAddr>().unwrap()]);
    }

    #[test]
    fn a_listener_is_near_its_limit_from_three_quarters_on() {
        let listener = |queue_length, queue_limit| Listening {
            address: "0.0.0.0:80".parse().unwrap(),
            queue_length,
            queue_limit,
        };
        for (length, limit, near) in [
            (0, 0, false),
            (1, 0, true),
            (95, 128, false),
            (96, 128, true),
            (129, 128, true),
        ] {
            assert_eq!(is_near(&listener(length, limit)), near, "{length} of {limit}");
        }
    }

    #[test]
    fn only_counters_of_losses_count() {
        let counter = WITNESSES[0].counters[0];
        let survey = Survey {
            counters: [(counter, 7), ("TcpExtTCPPureAcks", 9)].into(),
            ..Survey::default()
        };
        let mut pod = PodState::default();
        fill(&mut pod, &survey);
        assert_eq!(pod.counters, [(counter.to_owned(), 7)].into());
    }
}
