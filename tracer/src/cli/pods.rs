//! `droptrace pods`: who runs here, and how it gets on.

use std::{
    fmt::Write as _,
    io::{IsTerminal, stdout},
    process::ExitCode,
};

use super::{args::PodsArgs, run};
use crate::{
    context::pods::{Picture, PodState, picture},
    sink::{Paint, words},
};

pub(super) fn run(args: &PodsArgs) -> anyhow::Result<ExitCode> {
    let picture = picture(args.cri_socket.as_deref()).map_err(run::pods_problem)?;
    let text = if args.json {
        serde_json::to_string_pretty(&picture)? + "\n"
    } else {
        text(&picture, Paint::for_terminal(stdout().is_terminal()))
    };
    super::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn text(picture: &Picture, paint: Paint) -> String {
    let mut text = String::new();
    if picture.pods.is_empty() {
        text.push_str("no pod or container is up\n");
    }
    for pod in &picture.pods {
        one(&mut text, pod, paint);
    }
    for problem in &picture.problems {
        let _ = writeln!(
            text,
            "{}",
            paint.faint(&format!("note: {}", words::clean(problem)))
        );
    }
    text
}

fn one(text: &mut String, pod: &PodState, paint: Paint) {
    let containers: Vec<_> = pod.containers.iter().map(|name| words::clean(name)).collect();
    let name = match &pod.pod {
        Some(name) => words::clean(name).into_owned(),
        None => containers.join(", "),
    };
    let mut parts = Vec::new();
    parts.push(match (pod.netns, pod.host_network) {
        (_, true) => "network namespace of the host".to_owned(),
        (Some(netns), false) => format!("netns {netns}"),
        (None, false) => "its runtime does not tell its netns".to_owned(),
    });
    parts.extend(pod.addresses.iter().map(ToString::to_string));
    parts.extend(
        pod.interface
            .as_ref()
            .map(|name| format!("by {}", words::clean(name))),
    );
    if pod.pod.is_some() && !containers.is_empty() {
        parts.push(format!("containers {}", containers.join(", ")));
    }
    let _ = writeln!(text, "{}  {}", paint.strong(&name), parts.join(", "));
    if !pod.counters.is_empty() {
        let counters: Vec<String> = pod
            .counters
            .iter()
            .map(|(name, value)| format!("{name} {value}"))
            .collect();
        let _ = writeln!(
            text,
            "    counted since its netns was made: {}",
            counters.join(", ")
        );
    }
    for listener in &pod.listeners_near_limit {
        let _ = writeln!(
            text,
            "    listener {}: {} wait, limit {}",
            listener.address, listener.queue_length, listener.queue_limit
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::survey::Listening;

    #[test]
    fn the_list_reads_well() {
        let picture = Picture {
            pods: vec![
                PodState {
                    pod: Some("default/web".into()),
                    containers: vec!["nginx".into(), "log".into()],
                    netns: Some(4_026_532_000),
                    addresses: vec!["10.88.0.5".parse().unwrap(), "fd00::5".parse().unwrap()],
                    interface: Some("veth1".into()),
                    counters: [("TcpExtListenOverflows".into(), 7), ("UdpNoPorts".into(), 2)].into(),
                    listeners_near_limit: vec![Listening {
                        address: "0.0.0.0:80".parse().unwrap(),
                        queue_length: 120,
                        queue_limit: 128,
                    }],
                    ..PodState::default()
                },
                PodState {
                    pod: Some("kube-system/agent".into()),
                    netns: Some(4_026_531_840),
                    host_network: true,
                    ..PodState::default()
                },
                PodState {
                    containers: vec!["redis".into()],
                    ..PodState::default()
                },
            ],
            problems: vec!["/run/docker.sock does not answer: waited 1.5 s".into()],
        };
        assert_eq!(
            text(&picture, Paint::Plain),
            "default/web  netns 4026532000, 10.88.0.5, fd00::5, by veth1, containers nginx, log\n    \
             counted since its netns was made: TcpExtListenOverflows 7, UdpNoPorts 2\n    \
             listener 0.0.0.0:80: 120 wait, limit 128\n\
             kube-system/agent  network namespace of the host\n\
             redis  its runtime does not tell its netns\n\
             note: /run/docker.sock does not answer: waited 1.5 s\n"
        );
        assert_eq!(
            text(&Picture::default(), Paint::Plain),
            "no pod or container is up\n"
        );
    }
}
