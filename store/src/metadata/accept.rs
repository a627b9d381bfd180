//! Computes what indexing a pack changes in the tables, without the tables: a transaction loads the
//! known rows, asks for a [`Plan`] and writes it.
//!
//! Here a node comes to hold its children. Children that arrive in the same pack as their node are
//! inserted already counted: no second write.

pub(crate) use super::plan::{Contains, Insert, Known, Plan, Relocate};
use super::{Health, NewContainer, NewFrame, ObjectId, PackId};
use crate::error::{Error, Result};
use pfr_schema::container::Child;
use pfr_schema::frame::Header;
use pfr_schema::run::Shape;
use pfr_schema::{Digest, Kind};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

/// Most missing children named in an error.
const MISSING_NAMED: usize = 256;

/// An object during the planning.
struct Object {
    known: Known,
    /// References that this pack has added so far.
    added: u64,
    /// Position in [`Plan::insert`].
    inserted: Option<usize>,
    /// Position in [`Plan::relocate`].
    relocated: Option<usize>,
    /// Seen as a frame of this pack.
    framed: bool,
}

/// Where a frame lies.
#[derive(Clone, Copy)]
struct Place {
    header: Header,
    offset: u64,
}

impl Object {
    /// Raw bytes that a node that lists it reaches through it.
    fn reach(&self) -> u64 {
        self.known.size.saturating_add(self.known.logical_bytes)
    }
}

/// Every digest that frames and their nodes name, each once: what to load before
/// [`Plan::new`].
pub(crate) fn digests<'a>(frames: &'a [NewFrame]) -> Vec<Digest> {
    let children = |f: &'a NewFrame| f.container.iter().flat_map(|c| c.children.iter().map(|child| child.digest));
    let all: HashSet<Digest> = frames.iter().flat_map(|f| children(f).chain([f.header.digest])).collect();
    all.into_iter().collect()
}

impl Plan {
    /// Plans the storing of `frames` (children before the nodes that list them), given the stored
    /// objects. New objects get ids from `first_id` on.
    ///
    /// # Errors
    /// [`Error::Missing`] or [`Error::WrongShape`] if a node's children are not all stored as
    /// it says.
    pub(crate) fn new(frames: &[NewFrame], known: HashMap<Digest, Known>, pack: PackId, first_id: ObjectId) -> Result<Self> {
        let mut planner = Planner::new(known);
        for frame in frames {
            planner.frame(frame, pack, first_id);
            let place = Place { header: frame.header, offset: frame.offset };
            if let Some(container) = &frame.container {
                planner.accept(frame.header.digest, frame.header.kind, container, Some(place))?;
            } else if frame.header.kind.is_container() {
                // A rebuild recognises nodes by their frames alone, so a frame that says so is
                // preferred.
                planner.place(&frame.header.digest, place);
            }
        }
        Ok(planner.finish())
    }

    /// Plans the change of stored blobs to nodes. Also returns those whose children are not all
    /// stored.
    pub(crate) fn adopt(containers: &[(Digest, Kind, NewContainer)], known: HashMap<Digest, Known>) -> Result<(Self, Vec<Digest>)> {
        let (mut planner, mut refused) = (Planner::new(known), Vec::new());
        for (digest, kind, container) in containers {
            match planner.accept(*digest, *kind, container, None) {
                Ok(()) => {}
                Err(Error::Missing { .. } | Error::WrongShape { .. } | Error::Invalid(_)) => refused.push(*digest),
                Err(error) => return Err(error),
            }
        }
        Ok((planner.finish(), refused))
    }
}

struct Planner {
    objects: HashMap<Digest, Object>,
    plan: Plan,
}

impl Planner {
    fn new(known: HashMap<Digest, Known>) -> Self {
        let object = |known| Object { known, added: 0, inserted: None, relocated: None, framed: false };
        Self { objects: known.into_iter().map(|(digest, known)| (digest, object(known))).collect(), plan: Plan::default() }
    }

    fn frame(&mut self, frame: &NewFrame, pack: PackId, first_id: ObjectId) {
        let header = frame.header;
        match self.objects.entry(header.digest) {
            Entry::Vacant(entry) => {
                let position = self.plan.insert.len();
                let id = first_id + position as ObjectId;
                // It starts as a plain blob; only the acceptance of its references makes it a
                // node.
                self.plan.insert.push(Insert { header, offset: frame.offset, kind: Kind::Blob, refs: 0 });
                self.plan.live_bytes += header.frame_len();
                let known = Known {
                    id,
                    size: header.raw_len,
                    kind: Kind::Blob,
                    health: Health::Complete,
                    refs: 0,
                    shape: None,
                    logical_bytes: 0,
                    new_bytes: 0,
                    pack,
                    frame_len: header.frame_len(),
                };
                entry.insert(Object { known, added: 0, inserted: Some(position), relocated: None, framed: true });
            }
            Entry::Occupied(mut entry) => {
                let object = entry.get_mut();
                if object.framed {
                    return;
                }
                object.framed = true;
                self.plan.renew.push(object.known.id);
                if object.known.health == Health::Damaged {
                    // A node is complete again only when its references are accepted again.
                    object.known.health = if object.known.kind.is_container() { Health::Incomplete } else { Health::Complete };
                    self.plan.healed = true;
                    self.place(&header.digest, Place { header, offset: frame.offset });
                }
            }
        }
    }

    /// Gives an object a place in this pack, instead of its present or planned place.
    fn place(&mut self, digest: &Digest, place: Place) {
        let Some(object) = self.objects.get_mut(digest) else { return };
        let Place { header, offset } = place;
        let plan = &mut self.plan;
        if let Some(insert) = object.inserted.and_then(|at| plan.insert.get_mut(at)) {
            plan.live_bytes -= insert.header.frame_len();
            (insert.header, insert.offset) = (header, offset);
        } else if let Some(relocate) = object.relocated.and_then(|at| plan.relocate.get_mut(at)) {
            plan.live_bytes -= relocate.header.frame_len();
            (relocate.header, relocate.offset, relocate.health) = (header, offset, object.known.health);
        } else {
            object.relocated = Some(plan.relocate.len());
            plan.lost.push((object.known.pack, object.known.frame_len));
            plan.relocate.push(Relocate { id: object.known.id, header, offset, health: object.known.health });
        }
        plan.live_bytes += header.frame_len();
    }

    /// Makes a stored blob a node: its children must be stored as it lists them, and are held from
    /// now on. If this pack has a frame whose header gives the node's kind, the node's location
    /// becomes that frame: a rebuild recognises nodes by the kind in their frames.
    fn accept(&mut self, digest: Digest, kind: Kind, container: &NewContainer, place: Option<Place>) -> Result<()> {
        let held = match self.objects.get(&digest).map(|o| &o.known) {
            Some(known) if known.kind == kind && known.health == Health::Complete => return Ok(()),
            // It holds its children already. Their health is checked later.
            Some(known) if known.kind == kind => true,
            Some(known) if known.kind == Kind::Blob => false,
            // The one kind that is not decided by the bytes.
            Some(known) if known.kind == Kind::Manifest && kind == Kind::Image => return Ok(()),
            Some(known) if known.kind == Kind::Image && kind == Kind::Manifest => {
                return Err(Error::Invalid(format!("{digest} is stored as an image: push it as one")));
            }
            other => return Err(Error::Internal(format!("{digest} cannot become a {kind:?}, it is {:?}", other.map(|o| o.kind)))),
        };
        let children = self.children(digest, &container.children)?;
        let (mut ids, mut logical_bytes, mut new_bytes) = (Vec::with_capacity(children.len()), 0_u64, 0_u64);
        for child in children {
            let Some(object) = self.objects.get_mut(&child) else { continue };
            logical_bytes = logical_bytes.saturating_add(object.reach());
            if object.known.refs + object.added == 0 {
                new_bytes = new_bytes.saturating_add(object.known.size.saturating_add(object.known.new_bytes));
            }
            if !held {
                object.added += 1;
            }
            ids.push(object.known.id);
        }
        let Some(object) = self.objects.get_mut(&digest) else { return Ok(()) };
        if object.known.health != Health::Complete {
            // Also a blob that was damaged, and of which a rebuild could not tell that it is a
            // node.
            self.plan.recover.push(object.known.id);
            self.plan.healed = true;
        }
        let id = object.known.id;
        object.known.health = Health::Complete;
        if held {
            if let Some(place) = place {
                self.place(&digest, place);
            }
            return Ok(());
        }
        (object.known.kind, object.known.shape) = (kind, container.shape);
        (object.known.logical_bytes, object.known.new_bytes) = (logical_bytes, new_bytes);
        if object.inserted.is_none() {
            self.plan.promote.push((id, kind));
        }
        if let Some(place) = place {
            self.place(&digest, place);
        }
        self.plan.contain.push(Contains { object: id, children: ids, shape: container.shape, logical_bytes, new_bytes });
        Ok(())
    }

    /// The children, each once, all of them stored, well, and as their node says.
    fn children(&self, container: Digest, children: &[Child]) -> Result<Vec<Digest>> {
        let mut seen = HashSet::with_capacity(children.len());
        let (mut present, mut missing) = (Vec::with_capacity(children.len()), Vec::new());
        for child in children {
            let object = self
                .objects
                .get(&child.digest)
                .filter(|o| o.known.kind.satisfies(child.kind) && o.known.health as u8 <= Health::enough_for(child.kind) as u8)
                // A refusal would say that it is stored, though its sender may not know that.
                .filter(|o| !(child.optional && child.size.is_some_and(|size| size != o.known.size)));
            match object {
                Some(object) => {
                    check_shape(container, child, &object.known)?;
                    if seen.insert(child.digest) {
                        present.push(child.digest);
                    }
                }
                None if child.optional => {}
                None if seen.insert(child.digest) => missing.push(child.digest),
                None => {}
            }
        }
        if missing.is_empty() {
            return Ok(present);
        }
        missing.truncate(MISSING_NAMED);
        Err(Error::Missing { container, missing })
    }

    fn finish(self) -> Plan {
        let mut plan = self.plan;
        for object in self.objects.values() {
            match object.inserted {
                Some(position) => (plan.insert[position].refs, plan.insert[position].kind) = (object.added, object.known.kind),
                None if object.added > 0 => plan.count.push((object.known.id, object.added)),
                None => {}
            }
        }
        plan.renew.sort_unstable();
        plan.count.sort_unstable();
        plan.recover.sort_unstable();
        plan
    }
}

/// A child must have the length and shape that its node gives it: so a page's length is
/// checked once, when its page chunk is stored.
fn check_shape(container: Digest, child: &Child, known: &Known) -> Result<()> {
    if let Some(size) = child.size
        && size != known.size
    {
        return Err(Error::WrongShape {
            container,
            child: child.digest,
            expected: format!("{size} bytes"),
            found: format!("{} bytes", known.size),
        });
    }
    if child.shape.is_some() && child.shape != known.shape {
        let words =
            |s: Option<Shape>| s.map_or("no shape".into(), |s| format!("{} pages of {} × {} bytes", s.pages, s.components, s.page_bytes));
        return Err(Error::WrongShape { container, child: child.digest, expected: words(child.shape), found: words(known.shape) });
    }
    Ok(())
}
