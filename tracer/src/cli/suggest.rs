//! What a mistyped slug may mean.

use crate::diagnose::{catalogue, topics};

/// Slugs that are offered at most.
const OFFERED: usize = 4;

/// The slugs of causes and topics that are nearest to a wrong one, as ` (is X meant?)`; empty where none is near.
pub(super) fn meant(wrong: &str) -> String {
    near(
        wrong,
        catalogue()
            .iter()
            .map(|cause| cause.slug)
            .chain(topics().iter().map(|topic| topic.slug)),
    )
}

/// The same, of causes alone.
pub(super) fn cause_meant(wrong: &str) -> String {
    near(wrong, catalogue().iter().map(|cause| cause.slug))
}

fn near(wrong: &str, slugs: impl Iterator<Item = &'static str>) -> String {
    let slugs: Vec<_> = slugs.collect();
    let asked = letters(wrong);
    if asked.is_empty() {
        return String::new();
    }
    let mut found = by_distance(&asked, &slugs);
    if found.is_empty() {
        found = slugs
            .iter()
            .copied()
            .filter(|slug| asked.len() > 2 && letters(slug).contains(&asked))
            .collect();
    }
    if found.is_empty() {
        found = by_words(wrong, &slugs);
    }
    found.truncate(OFFERED);
    if found.is_empty() {
        String::new()
    } else {
        format!(" (is {} meant?)", found.join(" or "))
    }
}

/// Without what is easily mistyped: case, hyphens, underscores.
fn letters(slug: &str) -> String {
    slug.chars()
        .filter(char::is_ascii_alphanumeric)
        .map(|letter| letter.to_ascii_lowercase())
        .collect()
}

/// The nearest by edit distance: at most one letter in four is wrong.
fn by_distance(asked: &str, slugs: &[&'static str]) -> Vec<&'static str> {
    let distances: Vec<_> = slugs
        .iter()
        .map(|slug| (strsim::damerau_levenshtein(asked, &letters(slug)), *slug))
        .filter(|(distance, slug)| distance * 4 <= slug.len())
        .collect();
    let least = distances.iter().map(|(distance, _)| *distance).min();
    distances
        .into_iter()
        .filter(|(distance, _)| Some(*distance) == least)
        .map(|(_, slug)| slug)
        .collect()
}

/// Those that share most words.
fn by_words(wrong: &str, slugs: &[&'static str]) -> Vec<&'static str> {
    let wrong = wrong.to_ascii_lowercase();
    let asked: Vec<_> = wrong.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let shared = |slug: &str| slug.split('-').filter(|word| asked.contains(word)).count();
    let most = slugs.iter().map(|slug| shared(slug)).max().unwrap_or_default();
    slugs
        .iter()
        .copied()
        .filter(|slug| most > 0 && shared(slug) == most)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_slug_is_answered_with_the_nearest() {
        for (wrong, expected) in [
            ("accept-queue", "accept-queue-full"),
            ("Accept_Queue_Full", "accept-queue-full"),
            ("acceptqueuefull", "accept-queue-full"),
            ("acept-queue-ful", "accept-queue-full"),
            ("no-sokcet", "no-socket"),
            ("rpfilter", "rp-filter"),
            ("tw_recycle", "tw-recycle"),
            ("table-full-conntrack", "conntrack-table-full"),
        ] {
            assert_eq!(meant(wrong), format!(" (is {expected} meant?)"), "{wrong}");
        }
        for wrong in ["xyz", "", "-", "é"] {
            assert_eq!(meant(wrong), "", "{wrong}");
        }
    }

    #[test]
    fn several_are_offered_where_several_fit() {
        let offered = meant("paws");
        for slug in ["paws-established", "paws-request", "paws-timewait"] {
            assert!(offered.contains(slug), "{offered}");
        }
        assert_eq!(cause_meant("tw-recycle"), "");
    }
}
