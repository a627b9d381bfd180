//! Other domains, beside the one of the history: made, filled and deleted, with steps that die
//! anywhere. Some are encrypted, and the key that wraps theirs is replaced and destroyed.
//!
//! Steps come one after the other, between the waves of the history, so that the model has few
//! states.

use crate::check;
use crate::operations::{self, Manner};
use crate::signing::{self, IMAGES, KEYS};
use crate::snapshots::Snapshot;
use crate::world::World;
use object_store::path::Path;
use pfr_schema::api::{DomainInfo, DomainState};
use pfr_schema::{Digest, DomainName, ErrorCode, RepositoryName};
use pfr_store::{Budget, Domains, Error, GcOptions, Store, WrappedKey};
use rand::RngExt as _;
use rand::rngs::StdRng;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

/// The marker of a domain, and its wrapped key: the only objects of an encrypted one that can be
/// read without the key.
const PLAIN: [&str; 2] = ["pf-store", "pf-key"];
/// How each segment of an encrypted object begins, then the id of the key and the salt.
const MAGIC: &[u8] = b"pfs1";
const SALT: std::ops::Range<usize> = 8..32;
/// Bytes of each segment but the last.
const SEGMENT: usize = (64 << 10) + 48;

/// What is done with a domain.
#[derive(Clone, Debug)]
pub enum Step {
    /// It is made; `true`: encrypted.
    Make(DomainName, bool),
    /// A snapshot is pushed to it.
    Push(DomainName, Arc<Snapshot>),
    /// A snapshot is signed by the key of this number.
    Sign(DomainName, Digest, usize),
    /// A signature of something else is put where those of a snapshot are looked for.
    Forge(DomainName, Digest),
    /// A snapshot gets a tag that only signed ones get.
    Admit(DomainName, Digest),
    /// An image is pushed to it.
    Image(DomainName, u8),
    /// It is collected.
    Collect(DomainName),
    /// It is deleted.
    Delete(DomainName),
    /// The task that removes deleted domains runs.
    Remove,
    /// The keys of all domains are wrapped again, with the next key.
    Rewrap,
}

/// Something that is true of a domain.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fact {
    /// It is encrypted.
    Encrypted,
    /// It has a snapshot.
    Snapshot(Digest),
    /// The key of this number has signed a snapshot.
    Signed(Digest, usize),
    /// A snapshot has the tag that only signed ones get.
    Admitted(Digest),
    /// It has an image.
    Image(u8),
}

/// Facts by domain.
type Contents = BTreeMap<DomainName, BTreeSet<Fact>>;

/// What is known of the domains.
#[derive(Clone, Debug, Default)]
pub struct Tenants {
    /// Those that exist.
    live: Contents,
    /// What must survive the loss of the databases: what was acknowledged.
    durable: Contents,
    /// Those that were deleted. They come back if the catalogue is lost before their bytes are
    /// gone.
    deleted: BTreeMap<DomainName, Vec<BTreeSet<Fact>>>,
    /// Whether the databases were lost. Since then the place of a domain of which no one was told
    /// may not be empty.
    pub was_lost: bool,
}

fn name_of(text: &str) -> DomainName {
    text.parse().unwrap_or_else(|_| unreachable!())
}

/// The repository of snapshots, and that of images.
fn repositories() -> [RepositoryName; 2] {
    ["team/a", "team/images"].map(|name| name.parse().unwrap_or_else(|_| unreachable!()))
}

fn snapshot(first: u64) -> Snapshot {
    Snapshot::new(&[(first..first + 3).collect()], Vec::new())
}

/// The domain and the snapshot that steps are about.
pub type Focus = (DomainName, Snapshot);

impl Step {
    /// Draws a step. Three of four keep the domain and the snapshot of the step before: a
    /// signature, a forgery or a tag that asks for a signature has an effect only on a snapshot
    /// that was pushed to that domain.
    pub fn draw(random: &mut StdRng, focus: &mut Option<Focus>) -> Self {
        let again = random.random_bool(0.75);
        let (name, drawn) = focus
            .take_if(|_| again)
            .unwrap_or_else(|| (name_of(["acme", "b-2"][random.random_range(0..2)]), snapshot(random.random_range(0..4))));
        *focus = Some((name.clone(), drawn.clone()));
        match random.random_range(0..20) {
            0..4 => Self::Make(name, random.random_bool(0.6)),
            4..8 => Self::Push(name, Arc::new(drawn)),
            8..10 => Self::Sign(name, drawn.digest, random.random_range(0..KEYS)),
            10 => Self::Forge(name, drawn.digest),
            11..13 => Self::Admit(name, drawn.digest),
            13 => Self::Image(name, random.random_range(0..IMAGES)),
            14 => Self::Collect(name),
            15 => Self::Delete(name),
            16..18 => Self::Remove,
            _ => Self::Rewrap,
        }
    }

    /// Takes it.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn run(self, domains: Domains) -> Result<(), Error> {
        let [repository, images] = repositories();
        match self {
            Self::Make(name, encrypted) => domains.create_as(&name, Some(encrypted)).await.map(drop),
            Self::Push(name, snapshot) => {
                operations::push(&domains.open(&name).await?, &repository, &snapshot, None, Manner::Complete).await.0
            }
            Self::Sign(name, snapshot, key) => signing::sign(&domains.open(&name).await?, &repository, snapshot, key).await,
            Self::Forge(name, snapshot) => signing::forge(&domains.open(&name).await?, &repository, snapshot).await,
            Self::Admit(name, snapshot) => signing::admit(&domains.open(&name).await?, &repository, snapshot).await,
            Self::Image(name, number) => signing::push_image(&domains.open(&name).await?, &images, number).await,
            Self::Collect(name) => domains.open(&name).await?.gc(&GcOptions::default(), &mut |_| ()).await.map(drop),
            Self::Delete(name) => domains.delete(&name, false).await.map(drop),
            Self::Remove => domains.remove_deleted(&Budget::default()).await.map(drop),
            Self::Rewrap => {
                for row in live(&domains).await? {
                    domains.rewrap(&row.name).await?;
                }
                Ok(())
            }
        }
    }

    /// What there is after it, if it had its effect.
    fn apply(&self, contents: &mut Contents) {
        let Some(name) = self.name() else { return };
        if let Self::Make(_, encrypted) = self {
            contents.entry(name.clone()).or_insert_with(|| encrypted.then_some(Fact::Encrypted).into_iter().collect());
        }
        if let Self::Delete(_) = self {
            contents.remove(name);
        }
        let Some(found) = contents.get_mut(name) else { return };
        match self {
            Self::Push(_, snapshot) => drop(found.insert(Fact::Snapshot(snapshot.digest))),
            Self::Sign(_, snapshot, key) if found.contains(&Fact::Snapshot(*snapshot)) => drop(found.insert(Fact::Signed(*snapshot, *key))),
            // The policy asks for the first key.
            Self::Admit(_, snapshot) if found.contains(&Fact::Signed(*snapshot, 0)) => drop(found.insert(Fact::Admitted(*snapshot))),
            Self::Image(_, number) => drop(found.insert(Fact::Image(*number))),
            _ => {}
        }
    }

    fn name(&self) -> Option<&DomainName> {
        match self {
            Self::Make(name, _)
            | Self::Push(name, _)
            | Self::Sign(name, ..)
            | Self::Forge(name, _)
            | Self::Admit(name, _)
            | Self::Image(name, _)
            | Self::Collect(name)
            | Self::Delete(name) => Some(name),
            Self::Remove | Self::Rewrap => None,
        }
    }

    /// Whether the store must refuse it, with this code, where there is such a domain.
    fn is_refused(&self, code: ErrorCode, found: &BTreeSet<Fact>) -> bool {
        let lacks = |fact: Fact| !found.contains(&fact);
        match (code, self) {
            (ErrorCode::SnapshotUnknown | ErrorCode::RepositoryUnknown, Self::Sign(_, snapshot, _) | Self::Admit(_, snapshot)) => {
                lacks(Fact::Snapshot(*snapshot))
            }
            (ErrorCode::SignatureRequired, Self::Admit(_, snapshot)) => lacks(Fact::Signed(*snapshot, 0)),
            (ErrorCode::InvalidRequest, Self::Make(_, encrypted)) => lacks(Fact::Encrypted) == *encrypted,
            _ => false,
        }
    }
}

impl Tenants {
    /// Compares what there is after a step with what there may be. Without an answer the step died.
    /// `faults` says whether calls failed at random.
    ///
    /// # Errors
    /// In words: what is lost, or has no explanation.
    pub fn explain(&mut self, step: &Step, answer: Option<&Result<(), Error>>, faults: bool, seen: Contents) -> Result<(), String> {
        let found = step.name().and_then(|name| self.live.get(name));
        if let Some(Err(error)) = answer {
            let is_excused = match error.code() {
                ErrorCode::Internal | ErrorCode::CorruptStore => false,
                ErrorCode::DomainUnknown | ErrorCode::DomainBusy => found.is_none(),
                ErrorCode::SignatureRequired => found.is_some_and(|found| step.is_refused(ErrorCode::SignatureRequired, found)),
                // What lies in its place may be of another kind, and its key destroyed.
                ErrorCode::InvalidRequest | ErrorCode::Unavailable if found.is_none() && self.was_lost => {
                    faults || matches!(step, Step::Make(..))
                }
                code => faults || found.is_some_and(|found| step.is_refused(code, found)),
            };
            if !is_excused {
                return Err(format!("{step:?} of {self:?}: {:?}: {error}", error.code()));
            }
        }
        let mut after = self.live.clone();
        step.apply(&mut after);
        let may_be_as_before = !matches!(answer, Some(Ok(())));
        if seen != after && !(may_be_as_before && seen == self.live) {
            return Err(format!("after {step:?} ({answer:?}) of {:?}, found {seen:?}", self.live));
        }
        if !may_be_as_before {
            // What is acknowledged in a domain is durable only with the domain.
            if let Some(name) = step.name()
                && !matches!(step, Step::Delete(_) | Step::Collect(_))
                && let Some(facts) = seen.get(name)
            {
                let is_encrypted = facts.contains(&Fact::Encrypted);
                self.durable.entry(name.clone()).or_default().extend(is_encrypted.then_some(Fact::Encrypted));
            }
            // A signature is durable with its snapshot, which may not have been acknowledged.
            match step {
                Step::Sign(name, snapshot, _) | Step::Admit(name, snapshot) => {
                    let facts = seen.get(name).into_iter().flatten();
                    let of_it = facts.filter(|fact| matches!(fact, Fact::Snapshot(at) | Fact::Signed(at, _) if at == snapshot));
                    self.durable.entry(name.clone()).or_default().extend(of_it.cloned());
                }
                _ => {}
            }
            step.apply(&mut self.durable);
        }
        if let Step::Delete(name) = step
            && let Some(contents) = self.live.get(name).filter(|_| !seen.contains_key(name))
        {
            // Commits that were not acknowledged need not be in the journal.
            let least = self.durable.remove(name).unwrap_or_default();
            self.deleted.entry(name.clone()).or_default().extend([contents.clone(), least]);
        }
        self.live = seen;
        Ok(())
    }

    /// Compares what there is after the databases were lost and rebuilt. Something was left of some
    /// domains, and goes now: of those that were being made or deleted, and of no other.
    ///
    /// # Errors
    /// In words: what is lost, or has no explanation.
    pub fn rebuilt(&mut self, seen: Contents, left: Vec<DomainName>) -> Result<(), String> {
        let is_known = |name: &DomainName| self.deleted.contains_key(name) || self.live.contains_key(name);
        if let Some(name) = left.iter().find(|name| !is_known(name)) {
            return Err(format!("LEAKED: something lies in the place of domain {name}, which was gone: {self:?}"));
        }
        let empty = BTreeSet::new();
        for name in self.live.keys().chain(self.durable.keys()).chain(seen.keys()) {
            let (live, durable, deleted) = (self.live.get(name), self.durable.get(name), self.deleted.get(name));
            let is_allowed = match seen.get(name) {
                None => durable.is_none(),
                Some(found) => {
                    let between = |least: &BTreeSet<Fact>, most: &BTreeSet<Fact>| found.is_superset(least) && found.is_subset(most);
                    live.is_some_and(|live| between(durable.unwrap_or(&empty), live))
                        || (durable.is_none() && deleted.into_iter().flatten().any(|most| between(&empty, most)))
                }
            };
            if !is_allowed {
                return Err(format!("LOST: domain {name} after the rebuild: found {:?}, of {self:?}", seen.get(name)));
            }
        }
        (self.live, self.durable) = (seen.clone(), seen);
        // Should the catalogue be lost again.
        self.deleted = left.into_iter().map(|name| (name, Vec::new())).collect();
        self.was_lost = true;
        Ok(())
    }
}

/// The rows of the domains that exist, but the default one.
async fn live(domains: &Domains) -> Result<Vec<DomainInfo>, Error> {
    let rows = domains.list(None, 1000).await?.rows;
    Ok(rows.into_iter().filter(|row| !row.name.is_default() && row.state == DomainState::Live).collect())
}

/// All domains but that of the history, with what is true of them. Everything in them is verified,
/// nothing lies where there is no domain, and nothing of an encrypted one can be read without its
/// key. If the databases `were_lost`, the wrapped key of a domain may lie there that no one was
/// told of: the next one of its name takes it.
///
/// # Errors
/// In words: what is corrupt, left over, or not encrypted.
pub async fn seen(world: &World, were_lost: bool) -> Result<Contents, String> {
    let domains = world.domains().await.map_err(|e| e.to_string())?;
    let rows = domains.list(None, 1000).await.map_err(|e| e.to_string())?.rows;
    let mut seen = Contents::new();
    let mut salts = HashSet::new();
    for row in live(&domains).await.map_err(|e| e.to_string())? {
        let mut facts = BTreeSet::new();
        if row.encrypted {
            // Before the domain is opened, which mends what lies beside the packs.
            sealed(world, &row.name, &mut salts)?;
            facts.insert(Fact::Encrypted);
        }
        let store = domains.open(&row.name).await.map_err(|e| format!("domain {} is not opened: {e}", row.name))?;
        facts.extend(contents(&store).await.map_err(|what| format!("{what}, in domain {}", row.name))?);
        seen.insert(row.name, facts);
    }
    let of_none = |key: &String| {
        let name = key.strip_prefix(DomainName::FOLDER).and_then(|rest| rest.split('/').nth(1));
        let is_told_of = |name: &str| rows.iter().any(|row| row.name.as_str() == name);
        name.is_some_and(|name| !(is_told_of(name) || were_lost && key.ends_with("/pf-key")))
    };
    match world.disk.keys().into_keys().find(of_none) {
        Some(key) => Err(format!("LEAKED: {key} is in no domain")),
        None => Ok(seen),
    }
}

/// What is true of the contents of a domain.
async fn contents(store: &Store) -> Result<BTreeSet<Fact>, String> {
    let [repository, images] = repositories();
    let names = check::names(store).await.map_err(|e| e.to_string())?;
    check::verified(store, &names).await?;
    let mut facts = BTreeSet::new();
    for digest in names.values().flat_map(|repository| repository.snapshots.keys()) {
        facts.insert(Fact::Snapshot(*digest));
        let signers = signing::signers(store, &repository, digest).await.map_err(|e| format!("signatures of {digest}: {e}"))?;
        facts.extend(signers.into_iter().map(|key| Fact::Signed(*digest, key)));
        if signing::is_admitted(store, &repository, digest).await.map_err(|e| e.to_string())? {
            facts.insert(Fact::Admitted(*digest));
        }
    }
    facts.extend(signing::images(store, &images).await?.into_iter().map(Fact::Image));
    Ok(facts)
}

/// Checks the objects of an encrypted domain. The wrapped key lies there before anything that needs
/// it, everything else is encrypted, and no salt comes twice.
fn sealed(world: &World, name: &DomainName, salts: &mut HashSet<Vec<u8>>) -> Result<(), String> {
    let prefix = format!("{}/{name}/", DomainName::FOLDER);
    let keys: Vec<String> = world.disk.keys().into_keys().filter(|key| key.starts_with(&prefix)).collect();
    let has = |inside: &str| keys.iter().any(|key| key[prefix.len()..] == *inside);
    let is_plain = |key: &str| PLAIN.contains(&&key[prefix.len()..]);
    if keys.iter().any(|key| key[prefix.len()..] != *PLAIN[1]) {
        let text = wrapped_key(world, name).unwrap_or_default();
        if !has(PLAIN[1]) || WrappedKey::parse(&text).is_err() {
            return Err(format!("LOST: domain {name} has no wrapped key beside its packs, but {text:?}, and {keys:?}"));
        }
    }
    for key in keys.iter().filter(|key| !is_plain(key)) {
        let Some(bytes) = world.disk.bytes(&Path::from(key.as_str())) else { continue };
        let begins = &bytes[..bytes.len().min(MAGIC.len())];
        if !MAGIC.starts_with(begins) {
            return Err(format!("READABLE: {key} of an encrypted domain begins with {begins:?}"));
        }
        let of_segments: HashSet<&[u8]> = bytes.chunks(SEGMENT).filter_map(|segment| segment.get(SALT)).collect();
        if of_segments.len() > 1 || of_segments.into_iter().any(|salt| !salts.insert(salt.to_vec())) {
            return Err(format!("READABLE: the salt of {key} is not its own"));
        }
    }
    Ok(())
}

/// What lies beside the packs of a domain in the place of its wrapped key.
fn wrapped_key(world: &World, name: &DomainName) -> Option<String> {
    let bytes = world.disk.bytes(&Path::from(format!("{}/{name}/{}", DomainName::FOLDER, PLAIN[1])))?;
    String::from_utf8(bytes.to_vec()).ok()
}

/// Checks what an acknowledged rewrap promises: beside its packs, each encrypted domain has the
/// wrapped key that the catalogue has. To be asked before a domain is opened, which mends that.
///
/// # Errors
/// In words: a key that is not the same.
pub async fn rewrapped(world: &World) -> Result<(), String> {
    let domains = world.domains().await.map_err(|e| e.to_string())?;
    for row in live(&domains).await.map_err(|e| e.to_string())?.iter().filter(|row| row.encrypted) {
        let decided = world.observer.metadata().domain_key(row.name.clone()).await.map_err(|e| e.to_string())?;
        let beside = wrapped_key(world, &row.name).map(|text| text.trim_end().to_owned());
        if decided != beside {
            return Err(format!("LOST: after a rewrap the catalogue has {decided:?} for domain {}, and its packs {beside:?}", row.name));
        }
    }
    Ok(())
}

/// Destroys the key that wrapped before, when all keys were acknowledged to be wrapped by the next
/// one. A domain that is being deleted may need it, should the catalogue be lost.
///
/// # Errors
/// In words: those of the store.
pub async fn settle(world: &mut World) -> Result<(), String> {
    let domains = world.domains().await.map_err(|e| e.to_string())?;
    let rows = domains.list(None, 1000).await.map_err(|e| e.to_string())?.rows;
    if rows.iter().all(|row| row.state == DomainState::Live) {
        world.keyring.settle().map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// Builds the tables of all domains anew, and deletes what is left of those that have no marker, as
/// an operator does after the default domain's. Returns their names.
///
/// # Errors
/// In words: those of the store.
pub async fn rebuild(world: &World) -> Result<Vec<DomainName>, String> {
    let domains = world.domains().await.map_err(|e| e.to_string())?;
    for name in domains.find().await.map_err(|e| e.to_string())? {
        let store = domains.adopt(&name).await.map_err(|e| format!("domain {name}: {e}"))?;
        store.rebuild(&mut |_| ()).await.map_err(|e| format!("rebuild of domain {name}: {e}"))?;
    }
    let left = domains.left().await.map_err(|e| e.to_string())?;
    for name in &left {
        domains.delete(name, false).await.map_err(|e| format!("the rest of domain {name}: {e}"))?;
    }
    Ok(left)
}

/// Deletes all domains to the last byte.
///
/// # Errors
/// In words: what is left.
pub async fn delete_all(world: &World, were_lost: bool) -> Result<(), String> {
    let domains = world.domains().await.map_err(|e| e.to_string())?;
    for row in domains.list(None, 1000).await.map_err(|e| e.to_string())?.rows.iter().filter(|row| !row.name.is_default()) {
        domains.delete(&row.name, false).await.map_err(|e| e.to_string())?;
    }
    for _ in 0..6 {
        // More than a lease after what an operation did before the clock went back a day.
        world.jump(i64::try_from(crate::world::HOUR).unwrap_or(0) * 26);
        domains.remove_deleted(&Budget::default()).await.map_err(|e| e.to_string())?;
    }
    let left = domains.list(None, 1000).await.map_err(|e| e.to_string())?.rows;
    if left.len() > 1 {
        return Err(format!("LEAKED: deleted domains do not go: {left:?}"));
    }
    seen(world, were_lost).await.map(drop)
}
