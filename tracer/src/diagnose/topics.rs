//! What people ask for by name although no drop of today bears it; `explain` lists it beside the causes.

/// Something worth explaining that is no cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topic {
    /// Short name in the field's terms.
    pub slug: &'static str,
    /// The topic in a few words.
    pub title: &'static str,
    /// The explanation, in paragraphs divided by an empty line.
    pub text: &'static str,
    /// Slugs of the causes that show the same symptom today.
    pub see: &'static [&'static str],
}

/// Every topic.
pub const fn topics() -> &'static [Topic] {
    TOPICS
}

/// The topic with this slug.
pub fn topic_by_slug(slug: &str) -> Option<&'static Topic> {
    TOPICS.iter().find(|topic| topic.slug == slug)
}

const TOPICS: &[Topic] = &[Topic {
    slug: "tw-recycle",
    title: "net.ipv4.tcp_tw_recycle dropped SYNs of clients behind NAT (kernels before 4.12)",
    text: "With net.ipv4.tcp_tw_recycle=1 and TCP timestamps, kernels before 4.12 remembered the last timestamp of each \
        client address and dropped any SYN from it with an older one for 60 s, whatever its port. Clients that \
        share one address behind NAT have timestamp clocks of their own, so all but one of them were refused at random. \
        The counter was PAWSPassive (`passive connections rejected because of time stamp`), and ListenDrops.\n\
        \n\
        The setting and the counter left in Linux 4.12: on a kernel of today this is never the cause, and a \
        sysctl.conf that still sets it has no effect. net.ipv4.tcp_tw_reuse is another thing: it concerns only \
        connections that this host opens.\n\
        \n\
        The same symptom, some SYNs of some clients unanswered, has these causes today. `paws-timewait`: the SYN meets \
        the TIME_WAIT of its own 4-tuple with an older timestamp; only that one port of that address is \
        concerned, for 60 s. `timewait-old-sequence`: the same without a newer timestamp and with an older sequence \
        number. `paws-request`: the same against a pending handshake. `ipvs-timewait-reuse`: the SYN meets a \
        left-over IPVS entry. `accept-queue-full`, `syn-queue-full` and `syn-backlog-last-quarter`: the \
        listener has no room; the last one refuses new clients while known ones get in, which looks most like it.",
    see: &[
        "paws-timewait",
        "timewait-old-sequence",
        "paws-request",
        "ipvs-timewait-reuse",
        "accept-queue-full",
        "syn-queue-full",
        "syn-backlog-last-quarter",
    ],
}];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::cause_by_slug;

    #[test]
    fn topics_name_causes_that_exist_and_none_themselves() {
        for topic in topics() {
            assert_eq!(topic_by_slug(topic.slug), Some(topic));
            assert!(
                cause_by_slug(topic.slug).is_none(),
                "{} is a cause, too",
                topic.slug
            );
            assert!(topic.text.ends_with('.'));
            for slug in topic.see {
                assert!(cause_by_slug(slug).is_some(), "no cause {slug}");
                assert!(
                    topic.text.contains(&format!("`{slug}`")),
                    "{slug} is not explained"
                );
            }
        }
    }
}
