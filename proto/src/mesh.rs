//! Who copies from whom: the graph along which one artifact spreads. Pure; the masters keep one per artifact and
//! tell each node its neighbours, the client's simulator runs the swarm on the same one.
//!
//! Up to [`EVERYBODY`] members everybody is a neighbour of everybody. Beyond:
//! - **Within a rack** the members stand on [`NEAR_RINGS`] rings, on each in an order of its own that follows from
//!   hashes of their ids; neighbours on any ring are neighbours. The union of a few random rings is an expander
//!   (Law and Siu, *Distributed construction of random expander networks*, INFOCOM 2003): few hops, and no small cut.
//! - **Between racks** only [`GATEWAYS`] members of each rack have neighbours elsewhere: they stand on
//!   [`FAR_RINGS`] rings of their own, over all racks, and within their rack they all know each other, so that
//!   they can share out what is to be brought in. A rack needs its content brought in once, which is the rate of
//!   one link; eight have room for that with some of them slow.
//! - **Seeds** are neighbours of all gateways of their own rack. Where a rack has [`SEED_ALONE`] or fewer other
//!   members, its seeds are gateways themselves; else nobody outside their rack asks them, so that the first copy
//!   of a block does not cross the spine only to come back.
//! - Where no racks are known all members are in one, and there are neither gateways nor far rings.
//!
//! # Guaranteed
//! - Symmetric: `a` is a neighbour of `b` exactly if `b` is one of `a`.
//! - Connected: every ring alone connects a rack, and every far ring the racks.
//! - At most [`MAX_NEIGHBOURS`] neighbours, whatever the number of members.
//! - Local: a member that comes or goes changes the lists of its neighbours and of those between whom it stood, and
//!   where it is (or displaces) a gateway those of the gateways. The others keep theirs.
//! - The graph follows from the members alone, not from the order in which they came.
//!
//! # Not guaranteed
//! - That what is left stays connected when many leave at once and nobody repairs it. With independent failures of
//!   5 % no member of a large rack is cut off (all of its two dozen neighbours would have to be among them); a rack
//!   is cut off if all eight gateways are.

use std::collections::{BTreeMap, BTreeSet};

/// Most members of which each knows all others. Connections and announcements grow with its square; up to here that
/// costs less than rings would, on which few members meet each other so often that some have far fewer neighbours than
/// others, and with them a smaller share of everybody's uplinks.
pub const EVERYBODY: usize = 64;
/// Rings within a rack: up to 24 neighbours. BitTorrent's trackers hand out 50 and its clients use some 30 of them;
/// from about 16 on the simulator sees no difference in speed, the rest is for the dead.
pub const NEAR_RINGS: usize = 12;
/// Rings of all gateways: up to 12 neighbours elsewhere.
pub const FAR_RINGS: usize = 6;
/// Members of each rack that have neighbours elsewhere.
pub const GATEWAYS: usize = 8;
/// Other members of its rack with which a seed is still asked from outside.
pub const SEED_ALONE: usize = 3;
/// Most neighbours of a member.
pub const MAX_NEIGHBOURS: usize = 2 * NEAR_RINGS + (GATEWAYS - 1) + 2 * FAR_RINGS + SEEDS;
/// Seeds of one rack that its gateways know. There is one seed at a time; two while one takes over.
pub const SEEDS: usize = 2;

/// A node's number in hashes. FNV-1a, mixed: stable over versions and platforms, for all must agree on it.
pub fn hash_id(node_id: &str) -> u64 {
    mix(node_id.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
    }))
}

/// The finalizer of SplitMix64.
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    hash: u64,
    rack: String,
    seed: bool,
}

/// A few rings with the same members, each in its own order.
#[derive(Clone, Debug)]
struct Rings<K> {
    /// Tells the rings of racks from the far ones.
    salt: u64,
    rings: Vec<BTreeSet<(u64, K)>>,
}

impl<K: Ord + Clone> Rings<K> {
    fn new(count: usize, salt: u64) -> Self {
        Self {
            salt,
            rings: vec![BTreeSet::new(); count],
        }
    }

    fn place(&self, ring: usize, hash: u64) -> u64 {
        mix(hash ^ mix(self.salt + ring as u64))
    }

    fn insert(&mut self, key: &K, hash: u64) {
        for ring in 0..self.rings.len() {
            let place = self.place(ring, hash);
            self.rings[ring].insert((place, key.clone()));
        }
    }

    fn remove(&mut self, key: &K, hash: u64) {
        for ring in 0..self.rings.len() {
            let place = self.place(ring, hash);
            self.rings[ring].remove(&(place, key.clone()));
        }
    }

    /// Before and after `key` on each ring.
    fn neighbours(&self, key: &K, hash: u64, into: &mut BTreeSet<K>) {
        for (ring, members) in self.rings.iter().enumerate() {
            let at = (self.place(ring, hash), key.clone());
            let after = members.range((std::ops::Bound::Excluded(&at), std::ops::Bound::Unbounded));
            let after = after.chain(members).next();
            let before = members.range(..&at).next_back();
            let before = before.or_else(|| members.last());
            into.extend(after.into_iter().chain(before).map(|(_, k)| k.clone()));
        }
    }
}

/// The members of one rack.
#[derive(Clone, Debug)]
struct Rack<K> {
    rings: Rings<K>,
    /// By hash: the first [`GATEWAYS`] are the gateways.
    order: BTreeSet<(u64, K)>,
    /// By hash, too.
    seeds: BTreeSet<(u64, K)>,
}

impl<K: Ord + Clone> Rack<K> {
    fn new() -> Self {
        Self {
            rings: Rings::new(NEAR_RINGS, 0x6e65_6172),
            order: BTreeSet::new(),
            seeds: BTreeSet::new(),
        }
    }

    /// Who brings in what the rack has not.
    fn gateways(&self) -> BTreeSet<(u64, K)> {
        // Who only sends brings nothing in, but may be the only one to bring anything out.
        let receivers = self.order.difference(&self.seeds);
        let mut gateways: BTreeSet<_> = receivers.take(GATEWAYS).cloned().collect();
        if self.order.len() - self.seeds.len() <= SEED_ALONE {
            gateways.extend(self.seeds.iter().take(SEEDS).cloned());
        }
        gateways
    }
}

/// The graph of one artifact. See the module.
#[derive(Clone, Debug)]
pub struct Mesh<K> {
    members: BTreeMap<K, Member>,
    racks: BTreeMap<String, Rack<K>>,
    gateways: Rings<K>,
}

impl<K: Ord + Clone> Default for Mesh<K> {
    fn default() -> Self {
        Self {
            members: BTreeMap::new(),
            racks: BTreeMap::new(),
            gateways: Rings::new(FAR_RINGS, 0x0066_6172),
        }
    }
}

impl<K: Ord + Clone> Mesh<K> {
    /// Nobody.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many members there are.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Whether it is one.
    pub fn contains(&self, key: &K) -> bool {
        self.members.contains_key(key)
    }

    /// A member comes, or is another one now. `hash` is its [`hash_id`], `rack` empty where it is not known; `seed`:
    /// it has or gets the content from outside.
    pub fn insert(&mut self, key: K, hash: u64, rack: &str, seed: bool) {
        let member = Member {
            hash,
            rack: rack.to_owned(),
            seed,
        };
        if self.members.get(&key) == Some(&member) {
            return;
        }
        self.remove(&key);
        self.change(rack, |rack| {
            rack.rings.insert(&key, hash);
            rack.order.insert((hash, key.clone()));
            if seed {
                rack.seeds.insert((hash, key.clone()));
            }
        });
        self.members.insert(key, member);
    }

    /// A member goes.
    pub fn remove(&mut self, key: &K) {
        let Some(member) = self.members.remove(key) else {
            return;
        };
        let at = (member.hash, key.clone());
        self.change(&member.rack, |rack| {
            rack.rings.remove(key, member.hash);
            rack.order.remove(&at);
            rack.seeds.remove(&at);
        });
        if self.racks.get(&member.rack).is_some_and(|r| r.order.is_empty()) {
            self.racks.remove(&member.rack);
        }
    }

    /// Changes a rack, and with it the far rings.
    fn change(&mut self, rack: &str, change: impl FnOnce(&mut Rack<K>)) {
        let rack = self.racks.entry(rack.to_owned()).or_insert_with(Rack::new);
        let before = rack.gateways();
        change(rack);
        let after = rack.gateways();
        for (hash, key) in before.difference(&after) {
            self.gateways.remove(key, *hash);
        }
        for (hash, key) in after.difference(&before) {
            self.gateways.insert(key, *hash);
        }
    }

    /// From whom `key` copies, ascending; nobody if it is no member.
    pub fn neighbours(&self, key: &K) -> Vec<K> {
        let Some(member) = self.members.get(key) else {
            return Vec::new();
        };
        if self.members.len() <= EVERYBODY {
            return self.members.keys().filter(|k| *k != key).cloned().collect();
        }
        let mut all = BTreeSet::new();
        let rack = &self.racks[&member.rack];
        rack.rings.neighbours(key, member.hash, &mut all);
        let gateways = rack.gateways();
        if self.racks.len() > 1 {
            let at = (member.hash, key.clone());
            let is_gateway = gateways.contains(&at);
            let seeds = || rack.seeds.iter().take(SEEDS);
            if is_gateway || seeds().any(|s| *s == at) {
                all.extend(gateways.iter().map(|(_, k)| k.clone()));
            }
            if is_gateway {
                all.extend(seeds().map(|(_, k)| k.clone()));
                self.gateways.neighbours(key, member.hash, &mut all);
            }
        }
        all.remove(key);
        all.into_iter().collect()
    }
}

#[cfg(test)]
mod tests;
