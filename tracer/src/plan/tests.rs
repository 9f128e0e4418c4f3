//! Plans from BTF and symbols written by hand.

use super::{blob::Blob, *};

const KALLSYMS: &str = "\
ffffffff81000100 T tcp_conn_request
ffffffff81000200 t tcp_peer_is_proven.isra.0
ffffffff81000300 T tcp_v4_syn_recv_sock
ffffffff81000400 t ip_handle_martian_source.isra.0
ffffffff81000500 t tcp_check_req
ffffffff81000600 t tcp_check_req
ffffffff81000700 T arp_error_report
ffffffff81000800 T cookie_v4_check
";

const IP_VS: &str = "\
ffffffffc0000100 t ip_vs_leave\t[ip_vs]
ffffffffc0000200 t ip_vs_in.part.0\t[ip_vs]
";

struct Fixture {
    root: tempfile::TempDir,
}

impl Fixture {
    /// A kernel that has what its hooks need, with functions whose types it does not describe.
    fn new(release: &str, kfree_skb_arguments: usize, kallsyms: &str) -> Self {
        const DESCRIBED: &[&str] = &[
            "tcp_conn_request",
            "tcp_v4_syn_recv_sock",
            "ip_handle_martian_source",
            "arp_error_report",
            "tcp_peer_is_proven",
            "cookie_v4_check",
        ];
        Self::describing(DESCRIBED.iter().copied(), release, kfree_skb_arguments, kallsyms)
    }

    fn describing(
        functions: impl Iterator<Item = &'static str>,
        release: &str,
        kfree_skb_arguments: usize,
        kallsyms: &str,
    ) -> Self {
        let fixture = Self {
            root: tempfile::tempdir().unwrap(),
        };
        let mut blob = Blob::new();
        let word = blob.int("u32", 4);
        let parameters = [
            ("sk", word),
            ("skb", word),
            ("req", word),
            ("dev", word),
            ("neigh", word),
        ];
        for function in functions {
            let count = if function == "tcp_peer_is_proven" { 2 } else { 5 };
            blob.function(function, &parameters[..count]);
        }
        let members = ["len", "head", "data", "protocol", "network_header"].map(|name| (name, word, 0, 0));
        blob.structure("sk_buff", 4, &members);
        blob.structure("bpf_array", 8, &[("pptrs", word, 0, 0)]);
        let pair = blob.structure("", 8, &[("net", word, 0, 0), ("net_statistics", word, 32, 0)]);
        blob.structure("net", 16, &[("mib", pair, 0, 0)]);
        blob.structure(
            "sock_common",
            20,
            &[("skc_net", pair, 64, 0), ("skc_refcnt", word, 128, 0)],
        );
        blob.enumeration(
            "",
            &[
                ("LINUX_MIB_LISTENOVERFLOWS", 19),
                ("LINUX_MIB_LISTENDROPS", 20),
                ("LINUX_MIB_TCPREQQFULLDROP", 75),
                ("LINUX_MIB_SYNCOOKIESFAILED", 3),
            ],
        );
        blob.tracepoint("kfree_skb", kfree_skb_arguments);
        if kfree_skb_arguments > 2 {
            blob.enumeration("skb_drop_reason", &[("SKB_DROP_REASON_IP_RPFILTER", 16)]);
        }
        fixture.write("sys/kernel/btf/vmlinux", &blob.bytes());
        fixture.write("proc/kallsyms", kallsyms.as_bytes());
        if kallsyms.contains("[ip_vs]") {
            fixture.write("sys/module/ip_vs/initstate", b"live\n");
        }
        fixture.write("proc/sys/kernel/osrelease", format!("{release}\n").as_bytes());
        fixture.write("proc/sys/kernel/random/boot_id", b"0-1\n");
        fixture.write("sys/bus/event_source/devices/kprobe/type", b"8\n");
        fixture
    }

    fn write(&self, path: &str, bytes: &[u8]) {
        let path = self.root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn remove(&self, path: &str) {
        fs::remove_dir_all(self.root.path().join(path)).unwrap();
    }

    fn plan(&self, hidden: &[&str]) -> Plan {
        self.try_plan(hidden).unwrap()
    }

    fn try_plan(&self, hidden: &[&str]) -> Result<Plan, PlanError> {
        Plan::probe(&ProbeOptions {
            root: self.root.path().to_owned(),
            hide_symbols: hidden.iter().map(|name| (*name).to_owned()).collect(),
        })
    }
}

fn choice<'a>(plan: &'a Plan, name: &str) -> &'a Choice {
    &plan
        .hooks
        .iter()
        .find(|planned| planned.hook.name == name)
        .unwrap()
        .choice
}

fn place(symbol: &str, module: Option<&str>, methods: &[Method]) -> Choice {
    Choice::Attach(Place {
        symbol: symbol.to_owned(),
        module: module.map(str::to_owned),
        methods: methods.to_vec(),
    })
}

fn impossible(choice: &Choice) -> &str {
    match choice {
        Choice::Impossible { reason } => reason,
        other => panic!("it can be attached: {other:?}"),
    }
}

fn gaps<'a>(plan: &'a Plan, cause: &str) -> Vec<Option<&'a str>> {
    plan.gaps
        .iter()
        .filter(|gap| gap.cause == cause)
        .map(|gap| gap.field.as_deref())
        .collect()
}

#[test]
fn each_hook_goes_where_this_kernel_lets_it() {
    let plan = Fixture::new("6.12.1", 4, KALLSYMS).plan(&[]);
    assert_eq!(plan.kernel.version(), Some((6, 12)));
    assert_eq!(
        *choice(&plan, "tcp_conn_request"),
        place("tcp_conn_request", None, &[Method::Trampoline, Method::Probe])
    );
    // Hardly ever called.
    assert_eq!(
        *choice(&plan, "cookie_v4_check"),
        place("cookie_v4_check", None, &[Method::Probe, Method::Trampoline])
    );
    // Split by the compiler: only its return value can be had.
    assert_eq!(
        *choice(&plan, "tcp_peer_is_proven"),
        place("tcp_peer_is_proven.isra.0", None, &[Method::Probe])
    );
    assert!(impossible(choice(&plan, "ip_handle_martian_source")).contains("no function"));
    assert!(impossible(choice(&plan, "tcp_check_req")).contains("2 functions"));
    assert_eq!(*choice(&plan, "ip_vs_leave"), Choice::Waiting { module: "ip_vs" });
}

#[test]
fn reasons_make_hooks_needless_and_causes_seen() {
    let without = Fixture::new("5.10.0-46-amd64", 2, KALLSYMS).plan(&[]);
    assert!(!without.has_reasons());
    assert!(matches!(choice(&without, "arp_error_report"), Choice::Attach(_)));
    assert_eq!(gaps(&without, "rp-filter"), [None]);
    let with = Fixture::new("6.1.0", 3, KALLSYMS).plan(&[]);
    assert!(with.has_reasons());
    assert!(matches!(choice(&with, "icmp_send"), Choice::NotNeeded { .. }));
    // The reason tells the cause; what the hook reads is missing.
    assert!(!gaps(&with, "rp-filter").contains(&None));
    assert!(gaps(&with, "rp-filter").contains(&Some("rp_filter")));
    assert_eq!(gaps(&with, "local-source"), [None]);
}

#[test]
fn a_hidden_symbol_costs_its_own_causes_alone() {
    let fixture = Fixture::new("6.12.1", 4, KALLSYMS);
    let (whole, hidden) = (fixture.plan(&[]), fixture.plan(&["tcp_v4_syn_recv_sock"]));
    assert!(impossible(choice(&hidden, "tcp_v4_syn_recv_sock")).contains("hidden by request"));
    let more: Vec<&Gap> = hidden
        .gaps
        .iter()
        .filter(|gap| !whole.gaps.contains(gap))
        .collect();
    assert_eq!(more.len(), 1);
    assert_eq!(more[0].cause, "accept-queue-full");
    assert_eq!(
        more[0].field.as_deref(),
        Some("stage: ack and syncookie-ack, IPv4")
    );
    assert!(whole.gaps.iter().all(|gap| hidden.gaps.contains(gap)));
}

#[test]
fn only_5_10_without_module_btf_takes_the_table() {
    let kallsyms = format!("{KALLSYMS}{IP_VS}");
    let old = Fixture::new("5.10.0-46-amd64", 2, &kallsyms).plan(&[]);
    assert_eq!(old.module_layout_source, ModuleLayoutSource::Table);
    assert_eq!(
        *choice(&old, "ip_vs_leave"),
        place("ip_vs_leave", Some("ip_vs"), &[Method::Probe])
    );
    assert_eq!(
        *choice(&old, "ip_vs_in"),
        place("ip_vs_in.part.0", Some("ip_vs"), &[Method::Probe])
    );
    let other = Fixture::new("5.12.0", 2, &kallsyms).plan(&[]);
    assert_eq!(other.module_layout, IpvsLayout::ABSENT);
    assert!(impossible(choice(&other, "ip_vs_leave")).contains("ip_vs_leave(skb)"));
    assert_eq!(gaps(&other, "ipvs-no-destination"), [None]);
}

#[test]
fn a_module_that_comes_brings_its_hooks() {
    let fixture = Fixture::new("5.10.0-46-amd64", 2, KALLSYMS);
    let mut plan = fixture.plan(&[]);
    assert_eq!(*choice(&plan, "ip_vs_leave"), Choice::Waiting { module: "ip_vs" });
    fixture.write("proc/kallsyms", format!("{KALLSYMS}{IP_VS}").as_bytes());
    fixture.write("sys/module/ip_vs/initstate", b"live\n");
    plan.refresh().unwrap();
    assert!(matches!(choice(&plan, "ip_vs_leave"), Choice::Attach(_)));
}

#[test]
fn without_kprobes_fentry_remains() {
    let fixture = Fixture::new("6.12.1", 4, &format!("{KALLSYMS}{IP_VS}"));
    fixture.remove("sys/bus");
    let plan = fixture.plan(&[]);
    assert_eq!(
        *choice(&plan, "tcp_conn_request"),
        place("tcp_conn_request", None, &[Method::Trampoline])
    );
    assert!(impossible(choice(&plan, "ip_vs_leave")).contains("no kprobes"));
}

#[test]
fn hidden_addresses_are_told_as_such() {
    let kallsyms = KALLSYMS
        .lines()
        .map(|line| format!("0000000000000000{}", &line[16..]))
        .collect::<Vec<_>>()
        .join("\n");
    let plan = Fixture::new("6.12.1", 4, &kallsyms).plan(&[]);
    let gap = plan
        .gaps
        .iter()
        .find(|gap| gap.field.as_deref() == Some("location"));
    assert!(gap.unwrap().reason.contains("kptr_restrict"));
    assert_eq!(
        gaps(&plan, "no-socket"),
        [Some("drops that only their place tells")]
    );
    // What is attached by name needs no address.
    assert!(matches!(choice(&plan, "tcp_conn_request"), Choice::Attach(_)));
}

#[test]
fn symbols_are_left_for_later_where_types_say_enough() {
    let kallsyms = format!("{KALLSYMS}ffffffff81000800 t tcp_v4_syn_recv_sock\n");
    let fixture = Fixture::describing(function_names(), "6.12.1", 4, &kallsyms);
    let mut plan = fixture.plan(&["tcp_v6_conn_request"]);
    assert!(!plan.has_symbols());
    assert_eq!(
        *choice(&plan, "tcp_v4_syn_recv_sock"),
        place("tcp_v4_syn_recv_sock", None, &[Method::Trampoline, Method::Probe])
    );
    assert!(impossible(choice(&plan, "tcp_v6_conn_request")).contains("hidden by request"));
    plan.find_symbols().unwrap();
    assert!(impossible(choice(&plan, "tcp_v4_syn_recv_sock")).contains("2 functions"));
    assert!(impossible(choice(&plan, "tcp_v6_syn_recv_sock")).contains("no function"));
    assert!(matches!(choice(&plan, "tcp_conn_request"), Choice::Attach(_)));
}

#[test]
fn no_btf_is_an_error_that_names_the_next_step() {
    let fixture = Fixture::new("6.12.1", 4, KALLSYMS);
    fixture.remove("sys/kernel/btf");
    let Err(error) = fixture.try_plan(&[]) else {
        panic!("a plan without BTF")
    };
    assert!(matches!(error, PlanError::NoBtf(BtfError::Absent { .. })));
    assert!(error.to_string().contains("next:"));
}

#[test]
fn identities_of_modules_leave_out_what_is_built_in_or_going() {
    let fixture = Fixture::new("6.12.1", 4, KALLSYMS);
    fixture.write("sys/module/ip_vs/initstate", b"live\n");
    fixture.write("sys/module/nf_conntrack/initstate", b"going\n");
    fixture.write("sys/module/nf_reject_ipv4/parameters/x", b"");
    let names: Vec<&str> = module_identities(fixture.root.path())
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    assert_eq!(names, ["ip_vs"]);
}
