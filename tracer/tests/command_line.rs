//! The program as a user meets it: exit status, standard error, and what becomes of bad input.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use droptrace::{
    diagnose::Record,
    sink::{Pcapng, Sink},
};
use tempfile::TempDir;

fn droptrace(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_droptrace"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("the program starts")
}

/// One line on standard error that names the next step, nothing on standard output, and this status.
#[track_caller]
fn refuses(arguments: &[&str], status: i32, expected: &str) {
    let output = droptrace(arguments);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    assert_one_line(&stderr, expected);
}

#[track_caller]
fn assert_one_line(stderr: &str, expected: &str) {
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.starts_with("droptrace: error: "), "{stderr}");
    assert!(stderr.contains(expected), "{stderr}");
    assert!(stderr.contains("next: "), "{stderr}");
}

fn drop_line(cause: &str, dport: u16) -> String {
    format!(
        r#"{{"type":"drop","time":"2026-01-02T03:04:05.123456789Z","ktime_ns":77,"verdict":"dropped","cause":"{cause}","title":"a title","benign":false,"found_by":"hook","packets":1,"netns":4026532000,"netns_name":"web","interface":"eth0","direction":"in","src":"10.0.0.1","dst":"10.0.0.2","sport":40000,"dport":{dport},"protocol":"tcp","flags":"S","length":60,"owner":null,"counter":null,"evidence":{{"stage":"syn"}},"remedy":[]}}"#
    )
}

fn lines() -> Vec<String> {
    let counts = r#"{"time":"2026-01-02T03:04:15Z","causes":[{"cause":"accept-queue-full","netns":4026532000,"verdict":"dropped","benign":false,"packets":2,"split":"exact"}],"lost_events":0,"lost":{},"uncounted":0,"clashes_resolved":0,"hints_orphaned":0}"#;
    vec![
        r#"{"type":"coverage","version":"0.1.0","kernel":"6.12.1","boot_id":"b","scope":{"netns":[],"addresses":[],"port":null,"protocol":null,"causes":[]},"hooks":[],"gaps":[]}"#.to_owned(),
        drop_line("accept-queue-full", 80),
        drop_line("accept-queue-full", 81),
        format!(r#"{{"type":"summary","seconds":1.5,"ended":"duration","counts":{counts},"syn_unanswered":[]}}"#),
    ]
}

fn write_capture(path: &Path, lines: &[String]) {
    let mut sink = Pcapng::new(fs::File::create(path).unwrap(), 1 << 20).unwrap();
    for line in lines {
        let record: Record = serde_json::from_str(line).unwrap();
        sink.record(&record, None).unwrap();
    }
    sink.finish().unwrap();
}

/// A folder, and a whole capture in it.
fn capture() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("drops.pcapng");
    write_capture(&path, &lines());
    (folder, path)
}

#[test]
fn a_wrong_command_line_is_status_2() {
    refuses(&["live", "--for", "soon"], 2, "--for");
    refuses(&["live", "--cause", "full-queue"], 2, "droptrace explain");
    refuses(&["live", "--pid", "x"], 2, "--pid");
    refuses(&["live", "--addr", "10.0.0"], 2, "--addr");
    refuses(&["live", "--json", "--", "true"], 2, "-o FILE");
    refuses(&["capture"], 2, "--output");
    refuses(&["capture", "-o", "f", "--max-size", "1T"], 2, "--max-size");
    refuses(&["explain", "accept-queue"], 2, "accept-queue-full");
    refuses(&["watch"], 2, "watch");
    refuses(&["show"], 2, "FILE");
    refuses(&["show", "f", "--netns", "/no/such/netns"], 2, "/no/such/netns");
}

#[test]
fn wrong_values_and_slugs_name_what_would_be_right() {
    refuses(&["live", "--for", "-5s"], 2, "next: droptrace live --help");
    refuses(&["live", "--for", "99999999999999d"], 2, "ten years");
    refuses(&["show", "f", "--pid", "-1"], 2, "next: droptrace show --help");
    refuses(&["explain", "Acept_Queue_Full"], 2, "accept-queue-full");
    refuses(&["live", "--cause", "no-sokcet"], 2, "no-socket");
}

#[test]
fn a_full_disk_asks_for_room() {
    let (_folder, path) = capture();
    for arguments in [
        &["explain"][..],
        &["schema"],
        &["show", path.to_str().unwrap()],
        &["show", path.to_str().unwrap(), "--json"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_droptrace"))
            .args(arguments)
            .stdout(fs::File::create("/dev/full").unwrap())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert_one_line(&String::from_utf8(output.stderr).unwrap(), "next: make room");
    }
}

#[test]
fn help_and_version_are_no_errors() {
    for arguments in [&["--help"][..], &["live", "--help"], &["--version"]] {
        let output = droptrace(arguments);
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{arguments:?}"
        );
        assert!(!output.stdout.is_empty());
    }
}

#[test]
fn a_capture_is_shown_as_it_was_told() {
    let (_folder, path) = capture();
    let output = droptrace(&["show", path.to_str().unwrap(), "--json"]);
    assert!(output.status.success());
    assert!(output.stderr.is_empty());
    let shown: Vec<Record> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let told: Vec<Record> = lines()
        .iter()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(shown, told);
}

#[test]
fn filters_choose_drops() {
    let (_folder, path) = capture();
    let path = path.to_str().unwrap();
    let drops = |filter: &[&str]| {
        let output = droptrace(&[&["show", path, "--json"], filter].concat());
        assert!(output.status.success());
        String::from_utf8(output.stdout)
            .unwrap()
            .matches(r#""type":"drop""#)
            .count()
    };
    assert_eq!(drops(&[]), 2);
    assert_eq!(drops(&["--port", "81"]), 1);
    assert_eq!(drops(&["--cause", "no-socket"]), 0);
    assert_eq!(drops(&["--netns", "web", "--addr", "10.0.0.1"]), 2);
    assert_eq!(drops(&["--protocol", "udp"]), 0);
}

#[test]
fn text_goes_without_escape_sequences_into_a_pipe() {
    let (_folder, path) = capture();
    let output = droptrace(&["show", path.to_str().unwrap(), "--port", "81"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!text.contains('\x1b'));
    assert!(text.contains("accept-queue-full dropped 10.0.0.1:40000 → 10.0.0.2:81"));
    assert!(text.contains("1 of 2 drops shown"));
}

#[test]
fn totals_are_those_of_the_whole_capture_whatever_the_filter() {
    let (_folder, path) = capture();
    let path = path.to_str().unwrap();
    for filter in [["--cause", "no-socket"], ["--port", "81"]] {
        let output = droptrace(&[&["show", path], &filter[..]].concat());
        let text = String::from_utf8(output.stdout).unwrap();
        let named = format!("{} {}", filter[0].trim_start_matches('-'), filter[1]);
        assert!(text.starts_with(&format!("only drops of: {named}\n")), "{text}");
        assert!(text.contains("2  accept-queue-full"), "{text}");
        assert_eq!(text.matches("the whole capture").count(), 1, "{text}");
        let output = droptrace(&[&["show", path, "--json"], &filter[..]].concat());
        let text = String::from_utf8(output.stdout).unwrap();
        let last: Record = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        let told: Record = serde_json::from_str(lines().last().unwrap()).unwrap();
        assert_eq!(last, told, "{filter:?}");
    }
}

#[test]
fn a_netns_that_no_record_bears_is_refused() {
    let (_folder, path) = capture();
    let path = path.to_str().unwrap();
    refuses(&["show", path, "--netns", "nope"], 2, "name one that it has: web");
    refuses(&["show", path, "--netns", "7"], 2, "no record of netns 7");
    // The name of a drop that is not shown stands in the table all the same.
    let output = droptrace(&["show", path, "--netns", "4026532000", "--cause", "no-socket"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("dropped       web\n"), "{text}");
}

#[test]
fn a_capture_comes_by_standard_input_too() {
    let (_folder, path) = capture();
    for (netns, status) in [("web", 0), ("nope", 2)] {
        let output = Command::new(env!("CARGO_BIN_EXE_droptrace"))
            .args(["show", "-", "--json", "--netns", netns])
            .stdin(fs::File::open(&path).unwrap())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(status), "{netns}");
        let drops = String::from_utf8(output.stdout)
            .unwrap()
            .matches(r#""type":"drop""#)
            .count();
        assert_eq!(drops, if status == 0 { 2 } else { 0 });
    }
    refuses(&["show", "-"], 1, "standard input: the file is empty");
}

#[test]
fn bad_files_are_refused() {
    let (folder, path) = capture();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let whole = fs::read(&path).unwrap();
    refuses(&["show", "/no/such/file"], 1, "No such file");
    refuses(&["show", folder.path().to_str().unwrap()], 1, "directory");
    refuses(&["show", &file("empty", b"")], 1, "empty");
    refuses(
        &["show", &file("random", &[7, 99, 3, 250, 11, 0, 8])],
        1,
        "not a pcapng file",
    );
    refuses(&["show", &file("header", &whole[..64])], 1, "next: ");
    refuses(
        &["show", &file("start", &whole[..9])],
        1,
        "nothing of it can be shown",
    );
    let mut later = whole.clone();
    let magic = b"droptrc\x1a";
    let at = later.windows(8).position(|window| window == magic).unwrap();
    later[at + 8] = u8::MAX;
    refuses(&["show", &file("later", &later)], 1, "later version");
    let foreign = [
        0x0a, 0x0d, 0x0d, 0x0a, 28, 0, 0, 0, 0x4d, 0x3c, 0x2b, 0x1a, 1, 0, 0, 0, 255, 255, 255, 255, 255,
        255, 255, 255, 28, 0, 0, 0,
    ];
    refuses(&["show", &file("foreign", &foreign)], 1, "no record of droptrace");
}

#[test]
fn a_cut_capture_shows_what_is_whole() {
    let (_folder, path) = capture();
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() - 10]).unwrap();
    let output = droptrace(&["show", path.to_str().unwrap(), "--json"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), 3);
    assert_one_line(&String::from_utf8(output.stderr).unwrap(), "cut off");
}

#[test]
fn a_killed_capture_is_shown_with_a_note() {
    let (_folder, path) = capture();
    write_capture(&path, &lines()[..3]);
    let output = droptrace(&["show", path.to_str().unwrap(), "--json"]);
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), 3);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.starts_with("droptrace: note: "), "{stderr}");
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let (_folder, path) = capture();
    let many: Vec<String> = (0..2000).map(|_| drop_line("accept-queue-full", 80)).collect();
    write_capture(&path, &many);
    for arguments in [
        &["show", path.to_str().unwrap(), "--json"][..],
        &["show", path.to_str().unwrap()],
        &["schema"],
        &["explain"],
    ] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_droptrace"))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert!(child.wait().unwrap().success(), "{arguments:?}: {stderr}");
        assert_eq!(stderr, "", "{arguments:?}");
    }
}

#[test]
fn without_the_bpf_object_live_says_how_to_build_it() {
    if droptrace::bpf::OBJECT.is_some() {
        // This build has it: the scenarios in guests run it.
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("drops.pcapng");
    refuses(&["live", "--no-tui", "--for", "1s"], 1, "cargo xtask build");
    refuses(
        &["capture", "--for", "1s", "-o", file.to_str().unwrap()],
        1,
        "cargo xtask build",
    );
}

#[test]
fn explain_and_schema_need_nothing() {
    for arguments in [
        &["explain"][..],
        &["explain", "accept-queue-full"],
        &["explain", "tw-recycle"],
        &["schema"],
    ] {
        let output = droptrace(arguments);
        assert!(output.status.success(), "{arguments:?}");
        assert!(!output.stdout.is_empty());
    }
}
