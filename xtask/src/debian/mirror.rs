//! Which Debian mirror this machine uses, as its own apt knows it.

use std::process::Command;

use anyhow::{Context as _, Result};

use crate::shell;

/// The environment variable that names another mirror.
const OVERRIDE: &str = "DROPTRACE_DEBIAN_MIRROR";

/// Suites by which a repository is known to be Debian's main archive.
const KNOWN_SUITES: &[&str] = &[
    "bullseye",
    "bookworm",
    "trixie",
    "forky",
    "duke",
    "sid",
    "oldoldstable",
    "oldstable",
    "stable",
    "testing",
    "unstable",
];

/// Base addresses of the archive, without a trailing slash.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mirror {
    archive: String,
    security: String,
}

impl Mirror {
    /// Finds the mirror: `$DROPTRACE_DEBIAN_MIRROR`, else what apt is configured with.
    ///
    /// # Errors
    /// When there is no apt or it knows no Debian archive.
    pub(crate) fn find() -> Result<Self> {
        if let Ok(archive) = std::env::var(OVERRIDE) {
            return Ok(Self::new(&archive, None));
        }
        let targets = shell::output(Command::new("apt-get").args([
            "indextargets",
            "--format",
            "$(REPO_URI) $(RELEASE)",
            "Created-By: Packages",
        ]))
        .context("cannot ask apt for this machine's Debian mirror")?;
        Self::from_index_targets(&targets).with_context(|| {
            format!("apt is configured with no Debian archive: set {OVERRIDE} to the address of one (the folder that holds dists/ and pool/)")
        })
    }

    /// Reads lines of `address release`, as `apt-get indextargets` prints them.
    fn from_index_targets(text: &str) -> Option<Self> {
        let repositories = || {
            text.lines().filter_map(|line| {
                let (address, release) = line.split_once(' ')?;
                Some((address, release.trim()))
            })
        };
        let archive = repositories().find(|(_, release)| KNOWN_SUITES.contains(release))?;
        let security = repositories().find(|(_, release)| {
            release
                .strip_suffix("-security")
                .is_some_and(|suite| KNOWN_SUITES.contains(&suite))
        });
        Some(Self::new(archive.0, security.map(|(address, _)| address)))
    }

    fn new(archive: &str, security: Option<&str>) -> Self {
        let archive = archive.trim_end_matches('/');
        let security = security.map_or_else(
            || {
                let parent = archive.strip_suffix("/debian").unwrap_or(archive);
                format!("{parent}/debian-security")
            },
            |address| address.trim_end_matches('/').to_owned(),
        );
        Self {
            archive: archive.to_owned(),
            security,
        }
    }

    /// The line of a `sources.list` for one suite.
    pub(crate) fn source_line(&self, suite: &str, keyring: &str) -> String {
        let base = if suite.ends_with("-security") {
            &self.security
        } else {
            &self.archive
        };
        format!("deb [arch=amd64 signed-by={keyring}] {base} {suite} main\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debian_is_found_among_other_repositories() {
        let mirror = Mirror::from_index_targets(
            "https://packages.example.org/node/ nodistro\n\
             http://mirror.example.org/debian/ bookworm\n\
             http://mirror.example.org/debian/ bookworm-updates\n\
             http://security.example.org/ bookworm-security\n",
        )
        .expect("an archive");
        assert_eq!(mirror.archive, "http://mirror.example.org/debian");
        assert_eq!(mirror.security, "http://security.example.org");
    }

    #[test]
    fn security_is_derived_when_it_is_not_configured() {
        let mirror =
            Mirror::from_index_targets("http://mirror.example.org/debian/ trixie\n").expect("an archive");
        assert_eq!(
            mirror.source_line("trixie-security", "/k.gpg"),
            "deb [arch=amd64 signed-by=/k.gpg] http://mirror.example.org/debian-security trixie-security main\n"
        );
        assert_eq!(
            mirror.source_line("sid", "/k.gpg"),
            "deb [arch=amd64 signed-by=/k.gpg] http://mirror.example.org/debian sid main\n"
        );
    }

    #[test]
    fn another_distribution_is_no_debian() {
        let ubuntu = "http://mirror.example.org/ubuntu/ jammy\n\
                      http://mirror.example.org/ubuntu/ jammy-security\n";
        assert_eq!(Mirror::from_index_targets(ubuntu), None);
        assert_eq!(Mirror::from_index_targets(""), None);
    }
}
