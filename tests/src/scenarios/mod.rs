//! The scenarios, by family of causes.

use crate::Scenario;

mod listener;

/// Every scenario.
pub fn all() -> Vec<Scenario> {
    [listener::SCENARIOS].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_short_enough_for_a_netns() {
        let mut names: Vec<_> = all().iter().map(|scenario| scenario.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(names.iter().all(|name| name.len() < 200));
    }
}
