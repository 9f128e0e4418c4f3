//! What stands between the stack and a device: its state, its queueing disciplines, the filters and programs that
//! see its packets; and how full a table of neighbours is.

use std::io;

use aya::programs::{SchedClassifier, TcAttachType};

use super::{
    bpf,
    netlink::{Message, Netlink, attributes, put, text, word},
};
use crate::diagnose::{BpfProgram, Filter, Link, NeighbourTable, Qdisc, Side, Xdp};

// Numbers of include/uapi/linux/rtnetlink.h, pkt_sched.h, pkt_cls.h, gen_stats.h, neighbour.h and if_link.h.
const IFINFOMSG: usize = 16;
const TCMSG: usize = 20;
const NDTMSG: usize = 4;
const IFF_UP: u32 = 1;
const IFF_LOWER_UP: u32 = 1 << 16;
const RTM_GETNEIGHTBL: u16 = 66;
const TCA_DUMP_INVISIBLE: u16 = 10;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_STATS2: u16 = 7;
const TCA_STATS_QUEUE: u16 = 3;
const TC_H_MAJOR: u32 = 0xffff_0000;
/// Parent of a `clsact` or `ingress` qdisc, which queues nothing.
const TC_H_CLSACT: u32 = 0xffff_fff1;
const TC_H_INGRESS: u32 = 0xffff_fff2;
const TC_H_EGRESS: u32 = 0xffff_fff3;

/// Asks about the device with this index in the netns of the socket, which must be the thread's own.
///
/// # Errors
/// There is no such device, or the kernel did not answer.
pub(super) fn read(route: &mut Netlink, index: u32) -> io::Result<Link> {
    let mut body = vec![0; IFINFOMSG];
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    let mut link = state(&route.ask(libc::RTM_GETLINK, &body)?);
    let mut body = tcmsg(0, 0);
    // Those that the kernel makes for classes by itself are kept from view else.
    put(&mut body, TCA_DUMP_INVISIBLE, &[]);
    link.qdiscs = qdiscs(&route.dump(libc::RTM_GETQDISC, &body)?, index);
    for (side, parent) in [(Side::Ingress, TC_H_INGRESS), (Side::Egress, TC_H_EGRESS)] {
        // Without a qdisc of that side there is nothing to list, which not every kernel calls an empty list.
        if let Ok(messages) = route.dump(libc::RTM_GETTFILTER, &tcmsg(index, parent)) {
            let found = messages.iter().filter_map(|message| filter(message, side));
            link.filters.extend(found);
        }
        link.filters.extend(attached(&link.name, side));
    }
    Ok(link)
}

fn tcmsg(index: u32, parent: u32) -> Vec<u8> {
    let mut body = vec![0; TCMSG];
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    body[12..16].copy_from_slice(&parent.to_ne_bytes());
    body
}

fn state(message: &Message) -> Link {
    const IFLA_XDP: u16 = 43;
    let flags = word(&message.body, 8).unwrap_or_default();
    let mut link = Link {
        up: flags & IFF_UP != 0,
        carrier: flags & IFF_LOWER_UP != 0,
        ..Link::default()
    };
    for (attribute, value) in attributes(&message.body, IFINFOMSG) {
        match attribute {
            libc::IFLA_IFNAME => link.name = text(value),
            libc::IFLA_TXQLEN => link.queue_length = word(value, 0).unwrap_or_default(),
            IFLA_XDP => link.xdp = xdp(value),
            _ => {}
        }
    }
    link
}

fn xdp(nested: &[u8]) -> Option<Xdp> {
    const IFLA_XDP_ATTACHED: u16 = 2;
    const IFLA_XDP_PROG_ID: u16 = 4;
    const IFLA_XDP_HW_PROG_ID: u16 = 7;
    let mode = attributes(nested, 0).find(|(each, _)| *each == IFLA_XDP_ATTACHED)?;
    let mode = match mode.1.first()? {
        1 => "native",
        2 => "generic",
        3 => "offloaded",
        4 => "several",
        _ => return None,
    };
    let program = attributes(nested, 0)
        .filter(|(each, _)| (IFLA_XDP_PROG_ID..=IFLA_XDP_HW_PROG_ID).contains(each))
        .find_map(|(_, id)| word(id, 0).filter(|&id| id != 0))
        .map(program);
    Some(Xdp {
        mode: mode.to_owned(),
        program,
    })
}

/// A program of the kernel by its id, with its name where that can be had.
pub(super) fn program(id: u32) -> BpfProgram {
    BpfProgram {
        id,
        name: bpf::name(id),
    }
}

fn qdiscs(messages: &[Message], index: u32) -> Vec<Qdisc> {
    let of_device: Vec<&Message> = messages
        .iter()
        .filter(|message| word(&message.body, 4) == Some(index))
        .collect();
    let parent = |message: &Message| word(&message.body, 12).unwrap_or_default();
    of_device
        .iter()
        .filter(|message| parent(message) != TC_H_CLSACT)
        .map(|message| {
            let handle = word(&message.body, 8).unwrap_or_default();
            let children = |other: &&&Message| handle != 0 && parent(other) & TC_H_MAJOR == handle;
            let mut qdisc = Qdisc {
                handle: handle_text(handle),
                leaf: !of_device.iter().any(|other| children(&other)),
                ..Qdisc::default()
            };
            let mut options = None;
            for (attribute, value) in attributes(&message.body, TCMSG) {
                match attribute {
                    TCA_KIND => qdisc.kind = text(value),
                    TCA_OPTIONS => options = Some(value),
                    TCA_STATS2 => {
                        if let Some((_, queue)) =
                            attributes(value, 0).find(|(each, _)| *each == TCA_STATS_QUEUE)
                        {
                            // `struct gnet_stats_queue`: qlen, backlog, drops.
                            qdisc.queued_packets = word(queue, 0).unwrap_or_default();
                            qdisc.queued_bytes = word(queue, 4).unwrap_or_default();
                            qdisc.drops = word(queue, 8).unwrap_or_default();
                        }
                    }
                    _ => {}
                }
            }
            if let Some(options) = options {
                (qdisc.limit_packets, qdisc.limit_bytes) = limit(&qdisc.kind, options);
                qdisc.loses = qdisc.kind == "netem" && netem_loses(options);
            }
            qdisc
        })
        .collect()
}

/// A handle as `tc` writes it.
fn handle_text(handle: u32) -> String {
    format!("{:x}:", handle >> 16)
}

/// What the options of a qdisc say of its limit, in packets or in bytes; neither where a kind has none, or another form.
fn limit(kind: &str, options: &[u8]) -> (Option<u32>, Option<u32>) {
    let attribute = |number: u16, at: usize| {
        attributes(options, 0)
            .find(|(each, _)| *each == number)
            .and_then(|(_, value)| word(value, at))
    };
    match kind {
        // `struct tc_fifo_qopt`; netem's begins with its latency, sfq's with quantum and perturbation.
        "pfifo" | "pfifo_head_drop" => (word(options, 0), None),
        "bfifo" => (None, word(options, 0)),
        "netem" => (word(options, 4), None),
        "sfq" => (word(options, 8), None),
        // TCA_CODEL_LIMIT, TCA_FQ_CODEL_LIMIT, TCA_PIE_LIMIT.
        "codel" | "fq_codel" | "pie" => (attribute(2, 0), None),
        // TCA_FQ_PLIMIT, TCA_FQ_PIE_LIMIT.
        "fq" | "fq_pie" => (attribute(1, 0), None),
        // TCA_TBF_PARMS, behind two rates of 12 bytes; TCA_RED_PARMS.
        "tbf" => (None, attribute(1, 24)),
        "red" => (None, attribute(1, 0)),
        _ => (None, None),
    }
}

/// Whether netem is told to lose packets: at random (`struct tc_netem_qopt`), or by a model (TCA_NETEM_LOSS).
fn netem_loses(options: &[u8]) -> bool {
    const TC_NETEM_QOPT: usize = 24;
    const TCA_NETEM_LOSS: u16 = 5;
    word(options, 8).unwrap_or_default() != 0
        || attributes(options, TC_NETEM_QOPT).any(|(each, _)| each == TCA_NETEM_LOSS)
}

/// A filter that does something of its own: a program, or actions.
fn filter(message: &Message, side: Side) -> Option<Filter> {
    const TCA_BPF_NAME: u16 = 7;
    const TCA_BPF_ID: u16 = 11;
    let preference = word(&message.body, 16)? >> 16;
    let mut kind = String::new();
    let mut options: &[u8] = &[];
    for (attribute, value) in attributes(&message.body, TCMSG) {
        match attribute {
            TCA_KIND => kind = text(value),
            TCA_OPTIONS => options = value,
            _ => {}
        }
    }
    let mut found = Filter {
        side,
        preference,
        ..Filter::default()
    };
    // TCA_BPF_ACT, TCA_MATCHALL_ACT, TCA_FLOWER_ACT, TCA_BASIC_ACT, TCA_FW_ACT, TCA_U32_ACT
    let acts = match kind.as_str() {
        "bpf" => 1,
        "matchall" => 2,
        "flower" | "basic" => 3,
        "fw" => 4,
        "u32" => 7,
        _ => 0,
    };
    let mut named = None;
    for (attribute, value) in attributes(options, 0) {
        match attribute {
            _ if attribute == acts => {
                found.actions = attributes(value, 0).filter_map(|(_, act)| action(act)).collect();
            }
            TCA_BPF_NAME if kind == "bpf" => named = Some(text(value)),
            TCA_BPF_ID if kind == "bpf" => found.program = word(value, 0).map(program),
            _ => {}
        }
    }
    if let Some(program) = &mut found.program {
        // Else the name that tc gave it, which may be no more than that of a file.
        program.name = program.name.take().or(named);
    }
    found.kind = kind;
    (found.program.is_some() || !found.actions.is_empty()).then_some(found)
}

/// An action as text, and how many packets it dropped.
fn action(nested: &[u8]) -> Option<crate::diagnose::Action> {
    const TCA_ACT_KIND: u16 = 1;
    const TCA_ACT_STATS: u16 = 4;
    let attribute = |number| {
        attributes(nested, 0)
            .find(|(each, _)| *each == number)
            .map(|(_, value)| value)
    };
    let drops = attribute(TCA_ACT_STATS)
        .and_then(|stats| attributes(stats, 0).find(|(each, _)| *each == TCA_STATS_QUEUE))
        .and_then(|(_, queue)| word(queue, 8));
    Some(crate::diagnose::Action {
        kind: text(attribute(TCA_ACT_KIND)?),
        drops: drops.unwrap_or_default(),
    })
}

/// Programs that are attached without a qdisc (tcx, since 6.6).
fn attached(device: &str, side: Side) -> Vec<Filter> {
    let point = match side {
        Side::Ingress => TcAttachType::Ingress,
        Side::Egress => TcAttachType::Egress,
    };
    let Ok((_, programs)) = SchedClassifier::query_tcx(device, point) else {
        return Vec::new();
    };
    programs
        .iter()
        .map(|program| Filter {
            side,
            kind: "tcx".to_owned(),
            program: Some(BpfProgram {
                id: program.id(),
                name: program.name_as_str().map(str::to_owned),
            }),
            ..Filter::default()
        })
        .collect()
}

/// Asks how full the table of neighbours of a family (`AF_INET`, `AF_INET6`) is. All network namespaces share it.
///
/// # Errors
/// The kernel did not answer.
pub(super) fn neighbour_table(route: &mut Netlink, family: u8) -> io::Result<NeighbourTable> {
    let mut body = vec![0; NDTMSG];
    body[0] = family;
    route
        .dump(RTM_GETNEIGHTBL, &body)?
        .iter()
        .filter(|message| message.body.first() == Some(&family))
        .find_map(table)
        .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
}

/// Of the messages only that of the table itself, not those of its devices, has limits.
fn table(message: &Message) -> Option<NeighbourTable> {
    const NDTA_THRESH3: u16 = 4;
    const NDTA_CONFIG: u16 = 5;
    const NDTA_STATS: u16 = 7;
    let attribute = |number| {
        attributes(&message.body, NDTMSG)
            .find(|(each, _)| *each == number)
            .map(|(_, value)| value)
    };
    Some(NeighbourTable {
        limit: word(attribute(NDTA_THRESH3)?, 0)?,
        // `struct ndt_config`: entries; `struct ndt_stats`: the last of eleven numbers is table_fulls.
        entries: word(attribute(NDTA_CONFIG)?, 4)?,
        refused: attribute(NDTA_STATS)
            .and_then(|stats| Some(u64::from_ne_bytes(stats.get(80..88)?.try_into().ok()?))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(head: usize, fill: impl FnOnce(&mut Vec<u8>)) -> Message {
        let mut body = vec![0; head];
        fill(&mut body);
        Message { kind: 0, body }
    }

    fn nested(fill: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut body = Vec::new();
        fill(&mut body);
        body
    }

    fn qdisc(index: u32, handle: u32, parent: u32, kind: &str, options: &[u8], drops: u32) -> Message {
        message(TCMSG, |body| {
            body[4..8].copy_from_slice(&index.to_ne_bytes());
            body[8..12].copy_from_slice(&handle.to_ne_bytes());
            body[12..16].copy_from_slice(&parent.to_ne_bytes());
            put(body, TCA_KIND, format!("{kind}\0").as_bytes());
            put(body, TCA_OPTIONS, options);
            let queue: Vec<u8> = [7, 700, drops, 0, 0]
                .iter()
                .flat_map(|number: &u32| number.to_ne_bytes())
                .collect();
            put(
                body,
                TCA_STATS2,
                &nested(|stats| put(stats, TCA_STATS_QUEUE, &queue)),
            );
        })
    }

    #[test]
    fn the_leaves_of_a_tree_of_qdiscs_are_known() {
        let limit = 1000_u32.to_ne_bytes();
        let found = qdiscs(
            &[
                qdisc(3, 0x1_0000, u32::MAX, "prio", &[], 5),
                qdisc(3, 0x10_0000, 0x1_0001, "pfifo", &limit, 5),
                qdisc(4, 0x1_0000, u32::MAX, "pfifo", &limit, 9),
                qdisc(3, 0xffff_0000, TC_H_CLSACT, "clsact", &[], 0),
            ],
            3,
        );
        let seen: Vec<_> = found
            .iter()
            .map(|qdisc| {
                (
                    qdisc.kind.as_str(),
                    qdisc.handle.as_str(),
                    qdisc.leaf,
                    qdisc.drops,
                )
            })
            .collect();
        assert_eq!(seen, [("prio", "1:", false, 5), ("pfifo", "10:", true, 5)]);
        assert_eq!(found[1].limit_packets, Some(1000));
        assert_eq!((found[1].queued_packets, found[1].queued_bytes), (7, 700));
    }

    #[test]
    fn limits_are_where_each_kind_has_them() {
        let words = |numbers: &[u32]| {
            numbers
                .iter()
                .flat_map(|number| number.to_ne_bytes())
                .collect::<Vec<_>>()
        };
        let netem = words(&[0, 30, 0, 0, 0, 0]);
        assert_eq!(limit("netem", &netem), (Some(30), None));
        assert!(!netem_loses(&netem));
        assert!(netem_loses(&words(&[0, 30, 1 << 31, 0, 0, 0])));
        let tbf = nested(|body| put(body, 1, &words(&[0, 0, 0, 0, 0, 0, 3000, 0, 0])));
        assert_eq!(limit("tbf", &tbf), (None, Some(3000)));
        let codel = nested(|body| put(body, 2, &words(&[40])));
        assert_eq!(limit("fq_codel", &codel), (Some(40), None));
        assert_eq!(limit("noqueue", &[]), (None, None));
    }

    #[test]
    fn a_filter_is_its_program_or_its_actions() {
        let head = |kind: &str, options: Vec<u8>| {
            message(TCMSG, |body| {
                body[16..20].copy_from_slice(&(49152_u32 << 16 | 3).to_ne_bytes());
                put(body, TCA_KIND, format!("{kind}\0").as_bytes());
                put(body, TCA_OPTIONS, &options);
            })
        };
        let bpf = head(
            "bpf",
            nested(|options| {
                put(options, 7, b"guard\0");
                // No program has this id.
                put(options, 11, &u32::MAX.to_ne_bytes());
            }),
        );
        let found = filter(&bpf, Side::Ingress).unwrap();
        assert_eq!((found.kind.as_str(), found.preference), ("bpf", 49152));
        assert_eq!(
            found.program,
            Some(BpfProgram {
                id: u32::MAX,
                name: Some("guard".to_owned())
            })
        );
        let matchall = head(
            "matchall",
            nested(|options| {
                let act = nested(|act| {
                    put(act, 1, b"gact\0");
                    let queue: Vec<u8> = [0, 0, 3, 0, 0]
                        .iter()
                        .flat_map(|number: &u32| number.to_ne_bytes())
                        .collect();
                    put(act, 4, &nested(|stats| put(stats, TCA_STATS_QUEUE, &queue)));
                });
                put(options, 2, &nested(|list| put(list, 1, &act)));
            }),
        );
        let found = filter(&matchall, Side::Egress).unwrap();
        assert_eq!(found.actions[0].kind, "gact");
        assert_eq!(found.actions[0].drops, 3);
        assert_eq!(filter(&head("u32", Vec::new()), Side::Egress), None);
    }

    #[test]
    fn a_device_says_its_state_and_its_xdp_program() {
        let link = state(&message(IFINFOMSG, |body| {
            body[8..12].copy_from_slice(&IFF_UP.to_ne_bytes());
            put(body, libc::IFLA_IFNAME, b"eth0\0");
            put(body, libc::IFLA_TXQLEN, &1000_u32.to_ne_bytes());
            put(body, 43, &nested(|xdp| put(xdp, 2, &[2])));
        }));
        assert!(link.up && !link.carrier);
        assert_eq!((link.name.as_str(), link.queue_length), ("eth0", 1000));
        assert_eq!(link.xdp.unwrap().mode, "generic");
        assert_eq!(xdp(&nested(|body| put(body, 2, &[0]))), None);
    }

    #[test]
    fn a_table_of_neighbours_is_read() {
        let found = table(&message(NDTMSG, |body| {
            put(body, 4, &1024_u32.to_ne_bytes());
            put(body, 5, &[0, 0, 0, 0, 9, 0, 0, 0]);
            let mut stats = vec![0; 80];
            stats.extend_from_slice(&17_u64.to_ne_bytes());
            put(body, 7, &stats);
        }));
        assert_eq!(
            found,
            Some(NeighbourTable {
                entries: u32::from_ne_bytes([9, 0, 0, 0]),
                limit: 1024,
                refused: Some(17),
            })
        );
        assert_eq!(table(&message(NDTMSG, |_| {})), None);
    }
}
