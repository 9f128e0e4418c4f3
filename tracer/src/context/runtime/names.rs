//! Names by what an event knows: netns, address, cgroup.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    net::IpAddr,
};

use super::{Container, Inventory, Pod};

/// Digits of the id of a container, as cgroups bear it.
const ID_DIGITS: usize = 64;

/// The names of a pod and of a container, as far as known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Named {
    /// `NAMESPACE/NAME`.
    pub(crate) pod: Option<String>,
    /// Name of the container.
    pub(crate) container: Option<String>,
}

impl Named {
    /// The one name that tells most: of the pod, else of the container.
    pub(crate) fn one(&self) -> Option<&String> {
        self.pod.as_ref().or(self.container.as_ref())
    }
}

/// Who has a network namespace of its own, and which addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holder {
    /// Its names.
    pub(crate) named: Named,
    /// Its addresses, as the runtime tells them.
    pub(crate) addresses: Vec<IpAddr>,
}

/// Names of all that run. What two claim is nobody's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Names {
    namespaces: BTreeMap<u32, Holder>,
    addresses: BTreeMap<IpAddr, Option<u32>>,
    containers: BTreeMap<String, Named>,
}

impl Names {
    /// As the runtimes tell them. A place that does not hold any more names nobody.
    pub(crate) fn of(inventory: &Inventory) -> Self {
        let mut names = Self::default();
        let mut claimed: BTreeMap<u32, Option<Holder>> = BTreeMap::new();
        let mut claim = |inode: u32, holder: Holder| match claimed.entry(inode) {
            Entry::Vacant(entry) => {
                entry.insert(Some(holder));
            }
            Entry::Occupied(mut entry) => {
                entry.insert(None);
            }
        };
        for pod in &inventory.pods {
            let named = Named {
                pod: Some(pod.full_name()),
                container: only_container(inventory, pod),
            };
            if let Some(place) = pod
                .place
                .as_ref()
                .filter(|place| !pod.host_network && place.holds())
            {
                claim(
                    place.inode,
                    Holder {
                        named: named.clone(),
                        addresses: pod.addresses.clone(),
                    },
                );
            }
            // The sandbox has a process of its own, which is in none of its containers.
            names.containers.insert(
                pod.id.clone(),
                Named {
                    container: None,
                    ..named
                },
            );
        }
        for container in &inventory.containers {
            let pod = container.pod.as_ref().and_then(|id| inventory.pod(id));
            let named = Named {
                pod: pod.map(Pod::full_name),
                container: Some(container.name.clone()),
            };
            let own = container
                .place
                .as_ref()
                .filter(|_| !container.host_network && !container.shares);
            if let Some(place) = own.filter(|place| place.holds()) {
                claim(
                    place.inode,
                    Holder {
                        named: named.clone(),
                        addresses: container.addresses.clone(),
                    },
                );
            }
            names.containers.insert(container.id.clone(), named);
        }
        for (inode, holder) in claimed {
            let Some(holder) = holder else { continue };
            for address in &holder.addresses {
                names
                    .addresses
                    .entry(*address)
                    .and_modify(|claimed| *claimed = None)
                    .or_insert(Some(inode));
            }
            names.namespaces.insert(inode, holder);
        }
        names
    }

    /// One pod alone, as tests want it.
    #[cfg(test)]
    pub(crate) fn of_one(netns: u32, pod: &str, addresses: &[IpAddr]) -> Self {
        let holder = Holder {
            named: Named {
                pod: Some(pod.to_owned()),
                container: None,
            },
            addresses: addresses.to_vec(),
        };
        Self {
            namespaces: [(netns, holder)].into(),
            addresses: addresses.iter().map(|address| (*address, Some(netns))).collect(),
            containers: BTreeMap::new(),
        }
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.containers.is_empty()
    }

    /// Who has this netns.
    pub(crate) fn of_netns(&self, netns: u32) -> Option<&Named> {
        self.namespaces.get(&netns).map(|holder| &holder.named)
    }

    /// Who has this address.
    pub(crate) fn of_address(&self, address: IpAddr) -> Option<&Named> {
        let netns = (*self.addresses.get(&address)?)?;
        self.of_netns(netns)
    }

    /// In which container a process is, by its `/proc/PID/cgroup`.
    pub(crate) fn of_cgroup(&self, text: &str) -> Option<&Named> {
        // The innermost one: a container may hold others.
        let ids = text.lines().flat_map(|line| line.rsplit('/')).filter_map(id);
        ids.into_iter().find_map(|id| self.containers.get(id))
    }

    /// All who have a netns of their own.
    pub(crate) fn holders(&self) -> impl Iterator<Item = (u32, &Holder)> {
        self.namespaces.iter().map(|(inode, holder)| (*inode, holder))
    }

    /// Forgets a netns that vanished: another one may get its number, and another pod its addresses.
    pub(crate) fn forget(&mut self, netns: u32) {
        if let Some(holder) = self.namespaces.remove(&netns) {
            for address in holder.addresses {
                self.addresses.remove(&address);
            }
        }
    }
}

/// The name of the container of a pod that has one alone.
fn only_container(inventory: &Inventory, pod: &Pod) -> Option<String> {
    let is_of = |container: &&Container| container.pod.as_ref() == Some(&pod.id);
    let mut of_pod = inventory.containers.iter().filter(is_of);
    match (of_pod.next(), of_pod.next()) {
        (Some(container), None) => Some(container.name.clone()),
        _ => None,
    }
}

/// The id in a part of a cgroup's path, such as `cri-containerd-ID.scope`, `docker-ID.scope`, or `ID` alone.
fn id(part: &str) -> Option<&str> {
    let part = part.strip_suffix(".scope").unwrap_or(part);
    // systemd's driver of containerd writes SLICE:cri-containerd:ID.
    let part = part.rsplit(['-', ':']).next()?;
    (part.len() == ID_DIGITS && part.bytes().all(|digit| digit.is_ascii_hexdigit())).then_some(part)
}

#[cfg(test)]
mod tests {
    use super::{super::Place, *};

    fn here() -> Place {
        Place::first(["/proc/self/ns/net".into()]).unwrap()
    }

    fn id_of(digit: char) -> String {
        std::iter::repeat_n(digit, ID_DIGITS).collect()
    }

    fn pod(digit: char, name: &str, place: Option<Place>, address: &str) -> Pod {
        Pod {
            id: id_of(digit),
            namespace: "default".into(),
            name: name.into(),
            place,
            addresses: address.parse().into_iter().collect(),
            ..Pod::default()
        }
    }

    fn container(digit: char, name: &str, pod: Option<char>, place: Option<Place>) -> Container {
        Container {
            id: id_of(digit),
            name: name.into(),
            pod: pod.map(id_of),
            place,
            ..Container::default()
        }
    }

    fn named(pod: Option<&str>, container: Option<&str>) -> Named {
        Named {
            pod: pod.map(str::to_owned),
            container: container.map(str::to_owned),
        }
    }

    #[test]
    fn netns_address_and_cgroup_have_names() {
        let names = Names::of(&Inventory {
            pods: vec![pod('a', "web", Some(here()), "10.88.0.5")],
            containers: vec![
                container('b', "nginx", Some('a'), None),
                container('c', "redis", None, None),
            ],
        });
        let web = named(Some("default/web"), Some("nginx"));
        assert_eq!(names.of_netns(here().inode), Some(&web));
        assert_eq!(names.of_address("10.88.0.5".parse().unwrap()), Some(&web));
        assert_eq!(names.of_address("10.88.0.6".parse().unwrap()), None);
        let (a, b, c) = (id_of('a'), id_of('b'), id_of('c'));
        for (cgroup, expected) in [
            (format!("0::/kubepods/besteffort/pod1/{b}\n"), web.clone()),
            (
                format!("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{b}.scope"),
                web.clone(),
            ),
            (format!("12:cpu,cpuacct:/kubepods/pod1/{b}\n0::/"), web),
            (
                format!("0::/system.slice/kubepods-pod1.slice:cri-containerd:{a}"),
                named(Some("default/web"), None),
            ),
            (
                format!("0::/system.slice/docker-{c}.scope/init"),
                named(None, Some("redis")),
            ),
        ] {
            assert_eq!(names.of_cgroup(&cgroup), Some(&expected), "{cgroup}");
        }
        assert_eq!(
            names.of_cgroup(&format!("0::/kubepods/pod1/{}", id_of('f'))),
            None
        );
        assert_eq!(names.of_cgroup("0::/user.slice/user-0.slice"), None);
    }

    #[test]
    fn what_two_claim_is_nobodys() {
        let names = Names::of(&Inventory {
            pods: Vec::new(),
            containers: vec![
                container('a', "web", None, Some(here())),
                container('b', "side", None, Some(here())),
            ],
        });
        assert_eq!(names.of_netns(here().inode), None);
    }

    #[test]
    fn a_netns_that_is_shared_is_that_of_whom_it_was_made_for() {
        let mut shares = container('b', "side", None, Some(here()));
        shares.shares = true;
        let names = Names::of(&Inventory {
            pods: Vec::new(),
            containers: vec![container('a', "web", None, Some(here())), shares],
        });
        assert_eq!(names.of_netns(here().inode), Some(&named(None, Some("web"))));
    }

    #[test]
    fn several_containers_leave_the_name_of_the_pod() {
        let names = Names::of(&Inventory {
            pods: vec![pod('a', "web", Some(here()), "")],
            containers: vec![
                container('b', "nginx", Some('a'), None),
                container('c', "log", Some('a'), None),
            ],
        });
        assert_eq!(
            names.of_netns(here().inode),
            Some(&named(Some("default/web"), None))
        );
    }

    #[test]
    fn the_host_and_what_is_gone_have_no_name() {
        let mut of_host = pod('a', "agent", Some(here()), "10.0.0.1");
        of_host.host_network = true;
        let gone = Place {
            inode: 7,
            path: "/no/such/netns".into(),
        };
        let inventory = Inventory {
            pods: vec![of_host, pod('b', "gone", Some(gone), "10.88.0.9")],
            containers: Vec::new(),
        };
        let names = Names::of(&inventory);
        assert_eq!(names.holders().count(), 0);
        assert_eq!(names.of_address("10.0.0.1".parse().unwrap()), None);
        assert_eq!(names.of_address("10.88.0.9".parse().unwrap()), None);
    }

    #[test]
    fn a_netns_that_vanished_is_forgotten() {
        let mut names = Names::of(&Inventory {
            pods: vec![pod('a', "web", Some(here()), "10.88.0.5")],
            containers: Vec::new(),
        });
        names.forget(here().inode);
        assert_eq!(names.of_netns(here().inode), None);
        assert_eq!(names.of_address("10.88.0.5".parse().unwrap()), None);
    }
}
