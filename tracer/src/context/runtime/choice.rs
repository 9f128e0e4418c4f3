//! Which pods and containers the user means, at the start and after a restart.

use std::{collections::BTreeMap, fmt, path::PathBuf, str::FromStr};

use super::{Container, Inventory, Place, Pod};
use crate::diagnose::PodPattern;

/// Names that an error lists at most.
const LISTED: usize = 12;

/// Labels that a pod must have, all of them: `KEY=VALUE[,KEY=VALUE]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labels(BTreeMap<String, String>);

impl Labels {
    fn are_of(&self, pod: &Pod) -> bool {
        self.0
            .iter()
            .all(|(key, value)| pod.labels.get(key) == Some(value))
    }
}

impl FromStr for Labels {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let label = |each: &str| match each.split_once('=') {
            Some((key, value)) if !key.is_empty() && !key.ends_with('!') && !value.starts_with('=') => {
                Ok((key.to_owned(), value.to_owned()))
            }
            _ => Err("not a label; write KEY=VALUE, several with a comma between".to_owned()),
        };
        text.split(',').map(label).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let labels: Vec<_> = self
            .0
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        f.write_str(&labels.join(","))
    }
}

/// Pods and containers that the user named; each adds to the scope.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodRequest {
    /// Pods by name.
    pub pods: Vec<PodPattern>,
    /// Pods by labels.
    pub labels: Vec<Labels>,
    /// Containers by name, or by id or its beginning.
    pub containers: Vec<String>,
    /// Socket of the runtime to ask, instead of the usual ones.
    pub socket: Option<PathBuf>,
}

impl PodRequest {
    /// Whether nothing was named.
    pub fn is_empty(&self) -> bool {
        self.pods.is_empty() && self.labels.is_empty() && self.containers.is_empty()
    }
}

/// Why a request cannot be met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unmet {
    /// What the user said.
    pub(crate) asked: String,
    /// What is wrong with it.
    pub(crate) why: Why,
}

/// What is wrong with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// Nothing here is called so; these are here.
    None(Vec<String>),
    /// One was meant, and these are called so.
    Many(Vec<String>),
    /// The runtime does not tell the network namespace of this.
    NoPlace(String),
}

impl fmt::Display for Unmet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { asked, why } = self;
        match why {
            Why::None(here) if here.is_empty() => {
                write!(
                    f,
                    "{asked} is not on this host: its container runtime knows of none that is up"
                )
            }
            Why::None(here) => write!(f, "{asked} is not on this host; up are {}", listed(here)),
            Why::Many(meant) => write!(f, "{asked} may be any of {}: name one of them", listed(meant)),
            Why::NoPlace(name) => write!(
                f,
                "{name} is up, but its container runtime does not tell its network namespace: name that by --netns or --pid"
            ),
        }
    }
}

fn listed(names: &[String]) -> String {
    let shown = names.len().min(LISTED);
    let text = names[..shown].join(", ");
    match names.len() - shown {
        0 => text,
        more => format!("{text} and {more} more"),
    }
}

/// What is followed: whoever bears the name, now and later.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Followed {
    Pods(PodPattern),
    Labels(Labels),
    /// A container outside of any pod, by name.
    Named(String),
}

/// What the user means, once it is known to exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Choice(Vec<Followed>);

impl Choice {
    /// Finds what the user named.
    ///
    /// # Errors
    /// Nothing is called so, or many are where one was meant, or where it is cannot be told.
    pub(crate) fn of(request: &PodRequest, inventory: &Inventory) -> Result<Self, Unmet> {
        let pods = request.pods.iter().map(|pattern| pods(pattern, inventory));
        let labels = request.labels.iter().map(|labels| labelled(labels, inventory));
        let containers = request.containers.iter().map(|text| container(text, inventory));
        let followed: Vec<Followed> = pods.chain(labels).chain(containers).collect::<Result<_, _>>()?;
        let choice = Self(followed);
        if let Some((name, _)) = choice.members(inventory).find(|(_, place)| place.is_none()) {
            return Err(Unmet {
                asked: name.clone(),
                why: Why::NoPlace(name),
            });
        }
        Ok(choice)
    }

    /// The network namespaces of those who are meant and up.
    pub(crate) fn places(&self, inventory: &Inventory) -> BTreeMap<u32, PathBuf> {
        let places = self.members(inventory).filter_map(|(_, place)| place);
        places.map(|place| (place.inode, place.path.clone())).collect()
    }

    /// Those who are meant and have the network namespace of the host.
    pub(crate) fn in_host_network(&self, inventory: &Inventory) -> Vec<String> {
        let pods = inventory
            .pods
            .iter()
            .filter(|pod| pod.host_network && self.means_pod(pod));
        let containers = inventory.containers.iter();
        let containers = containers.filter(|each| each.host_network && self.means_container(each));
        pods.map(Pod::full_name)
            .chain(containers.map(|container| container.name.clone()))
            .collect()
    }

    fn members<'a>(
        &'a self,
        inventory: &'a Inventory,
    ) -> impl Iterator<Item = (String, Option<&'a Place>)> + 'a {
        let pods = inventory.pods.iter().filter(|pod| self.means_pod(pod));
        let containers = inventory.containers.iter();
        let containers = containers.filter(|container| self.means_container(container));
        pods.map(|pod| (pod.full_name(), pod.place.as_ref()))
            .chain(containers.map(|container| (container.name.clone(), container.place.as_ref())))
    }

    fn means_pod(&self, pod: &Pod) -> bool {
        self.0.iter().any(|followed| match followed {
            Followed::Pods(pattern) => pattern.matches(&pod.namespace, &pod.name),
            Followed::Labels(labels) => labels.are_of(pod),
            Followed::Named(_) => false,
        })
    }

    fn means_container(&self, container: &Container) -> bool {
        container.pod.is_none()
            && self.0.iter().any(|followed| match followed {
                Followed::Named(name) => container.name == *name,
                Followed::Pods(_) | Followed::Labels(_) => false,
            })
    }
}

fn none(asked: String, inventory: &Inventory) -> Unmet {
    Unmet {
        asked,
        why: Why::None(inventory.pods.iter().map(Pod::full_name).collect()),
    }
}

/// One pod by its name, which then is followed with its namespace; or all whose names begin so.
fn pods(pattern: &PodPattern, inventory: &Inventory) -> Result<Followed, Unmet> {
    let found: Vec<&Pod> = inventory
        .pods
        .iter()
        .filter(|pod| pattern.matches(&pod.namespace, &pod.name))
        .collect();
    let asked = || format!("pod {pattern}");
    if found.is_empty() {
        return Err(none(asked(), inventory));
    }
    if pattern.prefix {
        return Ok(Followed::Pods(pattern.clone()));
    }
    let mut names: Vec<String> = found.iter().map(|pod| pod.full_name()).collect();
    names.dedup();
    if names.len() > 1 {
        return Err(Unmet {
            asked: asked(),
            why: Why::Many(names),
        });
    }
    Ok(pod(found[0]))
}

fn pod(found: &Pod) -> Followed {
    Followed::Pods(PodPattern {
        namespace: Some(found.namespace.clone()),
        name: found.name.clone(),
        prefix: false,
    })
}

fn labelled(labels: &Labels, inventory: &Inventory) -> Result<Followed, Unmet> {
    if inventory.pods.iter().any(|pod| labels.are_of(pod)) {
        Ok(Followed::Labels(labels.clone()))
    } else {
        Err(none(format!("a pod with {labels}"), inventory))
    }
}

/// One container by its name, else by its id. What is followed is its pod, where it has one.
fn container(text: &str, inventory: &Inventory) -> Result<Followed, Unmet> {
    let with = |is_meant: &dyn Fn(&Container) -> bool| -> Vec<&Container> {
        inventory
            .containers
            .iter()
            .filter(|each| is_meant(each))
            .collect()
    };
    let mut found = with(&|container| container.name == text);
    if found.is_empty() {
        found = with(&|container| container.id.starts_with(text));
    }
    let asked = format!("container {text}");
    let name = |container: &Container| {
        let id: String = container.id.chars().take(12).collect();
        match container.pod.as_ref().and_then(|pod| inventory.pod(pod)) {
            Some(pod) => format!("{} of {} ({id})", container.name, pod.full_name()),
            None => format!("{} ({id})", container.name),
        }
    };
    match found[..] {
        [] => Err(Unmet {
            asked,
            why: Why::None(inventory.containers.iter().map(name).collect()),
        }),
        [found] => match &found.pod {
            None => Ok(Followed::Named(found.name.clone())),
            Some(id) => inventory.pod(id).map(pod).ok_or_else(|| Unmet {
                asked,
                why: Why::NoPlace(name(found)),
            }),
        },
        ref many => Err(Unmet {
            asked,
            why: Why::Many(many.iter().map(|each| name(each)).collect()),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(id: &str, namespace: &str, name: &str, inode: u32) -> Pod {
        Pod {
            id: id.into(),
            namespace: namespace.into(),
            name: name.into(),
            labels: [("app".to_owned(), name[..3].to_owned())].into(),
            place: (inode != 0).then(|| Place {
                inode,
                path: format!("/run/netns/{id}").into(),
            }),
            ..Pod::default()
        }
    }

    fn container(id: &str, name: &str, pod: Option<&str>, inode: u32) -> Container {
        Container {
            id: id.into(),
            name: name.into(),
            pod: pod.map(str::to_owned),
            place: (inode != 0).then(|| Place {
                inode,
                path: format!("/run/docker/netns/{id}").into(),
            }),
            ..Container::default()
        }
    }

    fn inventory() -> Inventory {
        Inventory {
            pods: vec![
                pod("s1", "default", "web-1", 1),
                pod("s2", "default", "web-2", 2),
                pod("s3", "default", "new", 0),
                pod("s4", "other", "web-1", 4),
            ],
            containers: vec![
                container("aaaa", "nginx", Some("s1"), 0),
                container("abbb", "nginx", Some("s2"), 0),
                container("cccc", "sidecar", Some("s2"), 0),
                container("dddd", "redis", None, 9),
            ],
        }
    }

    fn inodes(change: impl FnOnce(&mut PodRequest)) -> Result<Vec<u32>, String> {
        let mut request = PodRequest::default();
        change(&mut request);
        let choice = Choice::of(&request, &inventory()).map_err(|unmet| unmet.to_string())?;
        Ok(choice.places(&inventory()).into_keys().collect())
    }

    fn by_pod(text: &str) -> Result<Vec<u32>, String> {
        inodes(|request| request.pods.push(text.parse().unwrap()))
    }

    fn by_container(text: &str) -> Result<Vec<u32>, String> {
        inodes(|request| request.containers.push(text.to_owned()))
    }

    #[test]
    fn pods_are_found_by_name_and_by_its_beginning() {
        assert_eq!(by_pod("default/web-1"), Ok(vec![1]));
        assert_eq!(by_pod("web-2"), Ok(vec![2]));
        assert_eq!(by_pod("default/web*"), Ok(vec![1, 2]));
        assert_eq!(by_pod("web*"), Ok(vec![1, 2, 4]));
        assert_eq!(
            by_pod("web-1").unwrap_err(),
            "pod web-1 may be any of default/web-1, other/web-1: name one of them"
        );
        assert_eq!(
            by_pod("default/db").unwrap_err(),
            "pod default/db is not on this host; up are default/web-1, default/web-2, default/new, other/web-1"
        );
        assert!(
            by_pod("default/new")
                .unwrap_err()
                .contains("does not tell its network namespace")
        );
    }

    #[test]
    fn pods_are_found_by_labels() {
        let by = |text: &str| inodes(|request| request.labels.push(text.parse().unwrap()));
        assert_eq!(by("app=web"), Ok(vec![1, 2, 4]));
        assert!(
            by("app=web,tier=front")
                .unwrap_err()
                .contains("a pod with app=web,tier=front is not on this host")
        );
        for wrong in ["", "app", "=web", "app==web", "app!=web", "app=web,"] {
            assert!(wrong.parse::<Labels>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn containers_are_found_by_name_and_id() {
        assert_eq!(by_container("sidecar"), Ok(vec![2]));
        assert_eq!(by_container("redis"), Ok(vec![9]));
        assert_eq!(by_container("ab"), Ok(vec![2]));
        assert_eq!(
            by_container("nginx").unwrap_err(),
            "container nginx may be any of nginx of default/web-1 (aaaa), nginx of default/web-2 (abbb): name one of them"
        );
        assert!(by_container("a").unwrap_err().contains("may be any of"));
        assert!(by_container("postgres").unwrap_err().contains("redis (dddd)"));
    }

    #[test]
    fn all_that_is_named_adds_up() {
        let found = inodes(|request| {
            request.pods.push("default/web-1".parse().unwrap());
            request.containers.push("redis".to_owned());
        });
        assert_eq!(found, Ok(vec![1, 9]));
    }

    #[test]
    fn whoever_bears_the_name_later_is_followed() {
        let mut request = PodRequest::default();
        request.pods.push("web-2".parse().unwrap());
        request.containers.push("redis".to_owned());
        let choice = Choice::of(&request, &inventory()).unwrap();
        let later = Inventory {
            pods: vec![pod("s7", "default", "web-2", 7), pod("s8", "other", "web-2", 8)],
            containers: vec![
                container("eeee", "redis", None, 10),
                container("ffff", "redis", Some("s8"), 0),
            ],
        };
        assert_eq!(choice.places(&later).into_keys().collect::<Vec<_>>(), [7, 10]);
        assert!(choice.places(&Inventory::default()).is_empty());
    }

    #[test]
    fn a_long_list_is_cut() {
        let names: Vec<String> = (0..20).map(|number| format!("p{number}")).collect();
        assert!(listed(&names).ends_with("p11 and 8 more"));
    }
}
