//! Where netfilter ends packets, and the form of what rulesets tell about it.

use serde::{Deserialize, Serialize};

use super::{Facts, RawEvent};
use droptrace_common::Site;

/// A hook point, as `nft` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HookPoint {
    /// Before routing.
    Prerouting,
    /// To this host.
    Input,
    /// Through this host.
    Forward,
    /// From this host.
    Output,
    /// After routing.
    Postrouting,
    /// Of a device, before anything else.
    Ingress,
    /// Any of a bridge's own.
    Bridge,
}

impl HookPoint {
    /// The word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prerouting => "prerouting",
            Self::Input => "input",
            Self::Forward => "forward",
            Self::Output => "output",
            Self::Postrouting => "postrouting",
            Self::Ingress => "ingress",
            Self::Bridge => "bridge",
        }
    }

    /// That of a drop: the innermost frame of its stack that belongs to one.
    pub fn of(facts: &Facts) -> Option<Self> {
        facts.frames.iter().find_map(|frame| Self::of_frame(frame))
    }

    /// The hook point that a function calls netfilter for.
    fn of_frame(frame: &str) -> Option<Self> {
        Some(match frame.split('.').next().unwrap_or(frame) {
            "ip_rcv"
            | "ip_list_rcv"
            | "ip_sublist_rcv"
            | "ipv6_rcv"
            | "ipv6_list_rcv"
            | "ip6_sublist_rcv"
            | "br_nf_pre_routing"
            | "br_nf_pre_routing_ipv6" => Self::Prerouting,
            "ip_local_deliver" | "ip6_input" => Self::Input,
            "ip_forward" | "ip6_forward" | "br_nf_forward" | "br_nf_forward_ip" => Self::Forward,
            "__ip_local_out" | "ip_local_out" | "__ip6_local_out" | "ip6_local_out" | "ip6_xmit" => {
                Self::Output
            }
            "ip_output" | "ip_mc_output" | "ip6_output" | "br_nf_post_routing" => Self::Postrouting,
            "__netif_receive_skb_core" => Self::Ingress,
            "br_handle_frame" | "br_forward" | "__br_forward" | "br_pass_frame_up" => Self::Bridge,
            _ => return None,
        })
    }
}

/// What a rule did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Dropped the packet.
    Drop,
    /// Answered it, and dropped it.
    Reject,
    /// Translated it to an address of the device that it leaves by, or dropped it since that has none.
    Masquerade,
}

/// Hook points of IPv4 and IPv6, as a set: those where a rule is asked, or where a packet ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HookPoints(u16);

impl HookPoints {
    /// None.
    pub const NONE: Self = Self(0);
    /// All: where it is not known which.
    pub const ALL: Self = Self(u16::MAX);
    /// Bit of the first hook point of IPv6.
    const V6: u16 = 8;

    /// One hook point of IPv4 or IPv6. A bridge's own see both.
    pub const fn one(point: HookPoint, v6: bool) -> Self {
        let shift = match point {
            HookPoint::Bridge => point as u16,
            _ if v6 => point as u16 + Self::V6,
            _ => point as u16,
        };
        Self(1 << shift)
    }

    /// These and those.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether the two have one in common.
    pub const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// Where and how a rule ended a packet, as far as the event tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuleEnd {
    /// Where: one hook point, or all where the stack does not tell.
    pub points: HookPoints,
    /// How.
    pub ending: Ending,
    /// The place of the free says that nftables did it.
    pub nftables: bool,
}

impl RuleEnd {
    /// Of a packet that a verdict at a hook point ended; `facts` need the kernel's names only.
    pub fn of(event: &RawEvent, facts: &Facts) -> Option<Self> {
        // include/uapi/linux/if_ether.h
        const ETH_P_IPV6: u16 = 0x86dd;
        let place = facts.location.as_deref();
        if !matches!(place, Some("nf_hook_slow" | "nft_do_chain")) {
            return None;
        }
        let v6 = event.header.protocol == ETH_P_IPV6;
        Some(Self {
            points: HookPoint::of(facts).map_or(HookPoints::ALL, |point| HookPoints::one(point, v6)),
            ending: if event.site == Site::NetfilterReject {
                Ending::Reject
            } else {
                Ending::Drop
            },
            nftables: place == Some("nft_do_chain"),
        })
    }
}

/// What the rulesets of a netns tell of a packet that a rule ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// Base chains at the hook point of which a rule, a rule of a chain that they lead to, or the policy can end a packet so.
    pub chains: Vec<BaseChain>,
    /// Rules and policies that can, a few of them.
    pub rules: Vec<Rule>,
    /// How many there are.
    pub count: usize,
    /// Whether a rule at the hook point masquerades.
    #[serde(default)]
    pub masquerades: bool,
    /// The one whose counter alone moved, by as many packets as ended so.
    pub told: Option<Rule>,
    /// How many those were, between two readings.
    pub packets: u64,
    /// Why no rule is told.
    pub untold: Option<String>,
    /// All of them count, and none did between two readings around the packet: none of them ended it.
    #[serde(default)]
    pub unmoved: bool,
    /// Rulesets that could not be read, and why: what they hold is not among the above.
    pub unread: Vec<String>,
    /// How long the reading took, in microseconds.
    pub read_us: u64,
}

/// A chain that the kernel calls at a hook point.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseChain {
    /// `nftables` (rules of iptables-nft, too) or `iptables-legacy`.
    pub engine: String,
    /// Family and name, as `inet filter`.
    pub table: String,
    /// Name.
    pub chain: String,
}

/// A rule that can end a packet, or the policy of a chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// Chain at the hook point by which the packet comes to it.
    pub base: BaseChain,
    /// The rule within: `handle 4`, `rule 2 of chain LOGDROP`, `policy`.
    pub rule: String,
    /// The command that shows it.
    pub list: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hook_points_of_both_families_are_apart() {
        let points = [
            HookPoint::Prerouting,
            HookPoint::Input,
            HookPoint::Forward,
            HookPoint::Output,
            HookPoint::Postrouting,
            HookPoint::Ingress,
        ];
        for (index, point) in points.into_iter().enumerate() {
            for (other, another) in points.into_iter().enumerate() {
                let (v4, v6) = (HookPoints::one(point, false), HookPoints::one(another, true));
                assert!(!v4.meets(v6));
                assert_eq!(v4.meets(HookPoints::one(another, false)), index == other);
            }
            assert!(HookPoints::ALL.meets(HookPoints::one(point, true)));
            assert!(!HookPoints::NONE.meets(HookPoints::ALL));
        }
        assert_eq!(
            HookPoints::one(HookPoint::Bridge, true),
            HookPoints::one(HookPoint::Bridge, false)
        );
    }
}
