//! How pods are named: `NAMESPACE/NAME`, and patterns of such names.

use std::{fmt, str::FromStr};

/// A pod, or all pods whose names begin so, as the user writes it: `NAMESPACE/NAME`, `NAMESPACE/NAME*`, and without the
/// namespace where the name alone tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodPattern {
    /// Namespace; `None`: any.
    pub namespace: Option<String>,
    /// Name, or how it begins.
    pub name: String,
    /// Whether all names that begin so are meant.
    pub prefix: bool,
}

impl PodPattern {
    /// Whether this pod is meant.
    pub fn matches(&self, namespace: &str, name: &str) -> bool {
        self.namespace.as_deref().is_none_or(|wanted| wanted == namespace)
            && if self.prefix {
                name.starts_with(&self.name)
            } else {
                name == self.name
            }
    }

    /// The same of `NAMESPACE/NAME` in one word.
    pub fn matches_full_name(&self, full_name: &str) -> bool {
        full_name
            .split_once('/')
            .is_some_and(|(namespace, name)| self.matches(namespace, name))
    }
}

impl FromStr for PodPattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (namespace, name) = match text.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, text),
        };
        let prefix = name.ends_with('*');
        let name = name.strip_suffix('*').unwrap_or(name);
        let is_name = |text: &str| {
            text.chars()
                .all(|each| each.is_ascii_alphanumeric() || "-._".contains(each))
        };
        let whole = prefix || !name.is_empty();
        if !whole
            || !is_name(name)
            || namespace.is_some_and(|namespace| namespace.is_empty() || !is_name(namespace))
        {
            return Err("not the name of a pod; write NAMESPACE/NAME, or NAMESPACE/BEGINNING*".to_owned());
        }
        Ok(Self {
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
            prefix,
        })
    }
}

impl fmt::Display for PodPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(namespace) = &self.namespace {
            write!(f, "{namespace}/")?;
        }
        write!(f, "{}{}", self.name, if self.prefix { "*" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_read_and_matched() {
        for (text, meant, not_meant) in [
            ("default/web", "default/web", "default/web-1"),
            ("default/web*", "default/web-1", "other/web-1"),
            ("web", "other/web", "other/web-1"),
            ("web*", "other/web-1", "other/we"),
            ("default/*", "default/x", "other/x"),
        ] {
            let pattern: PodPattern = text.parse().unwrap();
            assert_eq!(pattern.to_string(), text);
            assert!(pattern.matches_full_name(meant), "{text} {meant}");
            assert!(!pattern.matches_full_name(not_meant), "{text} {not_meant}");
        }
        for wrong in ["", "/", "a/", "/a", "a/b/c", "a*b", "*a", "a b", "a/b**"] {
            assert!(wrong.parse::<PodPattern>().is_err(), "{wrong}");
        }
    }
}
