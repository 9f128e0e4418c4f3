//! Settings: `/proc/sys` as the calling thread's netns shows it.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::diagnose::ConntrackUsage;

/// Path of a sysctl; `{device}` stands for this device, whose name may hold dots.
pub(super) fn path(name: &str, device: Option<&str>) -> Option<PathBuf> {
    resolve(name, |word| if word == "{device}" { device } else { None }).map(|(_, path)| path)
}

/// Name and path of a sysctl whose parts in braces stand for what `words` says; a device's name may hold dots.
pub(super) fn resolve<'a>(name: &str, words: impl Fn(&str) -> Option<&'a str>) -> Option<(String, PathBuf)> {
    let mut path = PathBuf::from("/proc/sys");
    let mut parts = Vec::new();
    for part in name.split('.') {
        let part = match part {
            "" | ".." => return None,
            part if part.starts_with('{') => words(part)?,
            part => part,
        };
        path.push(part);
        parts.push(part);
    }
    Some((parts.join("."), path))
}

/// Reads a sysctl of the netns that the calling thread is in.
///
/// # Errors
/// The reason in words.
pub(super) fn read(path: &Path) -> Result<String, String> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(text.trim().to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(format!(
            "{} does not exist in this netns (module not loaded, or the kernel has no such setting)",
            path.display()
        )),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

/// How full the conntrack table of the calling thread's netns is.
///
/// # Errors
/// The reason in words.
pub(super) fn conntrack() -> Result<ConntrackUsage, String> {
    let number = |name: &str| {
        let path = path(name, None).ok_or_else(|| format!("{name} is no sysctl"))?;
        read(&path)?
            .parse()
            .map_err(|error| format!("{}: {error}", path.display()))
    };
    Ok(ConntrackUsage {
        count: number("net.netfilter.nf_conntrack_count")?,
        max: number("net.netfilter.nf_conntrack_max")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_with_dots_is_one_part() {
        assert_eq!(
            path("net.ipv4.conf.{device}.rp_filter", Some("eth0.100")),
            Some("/proc/sys/net/ipv4/conf/eth0.100/rp_filter".into())
        );
        assert_eq!(path("net.ipv4.conf.{device}.rp_filter", None), None);
        assert_eq!(
            path("net.core.somaxconn", None),
            Some("/proc/sys/net/core/somaxconn".into())
        );
        assert_eq!(path("net...core", None), None);
    }

    #[test]
    fn an_absent_sysctl_says_so() {
        let reason = read(Path::new("/proc/sys/net/no_such_setting")).unwrap_err();
        assert!(reason.contains("does not exist"), "{reason}");
    }
}
