//! The list of evidence of a cause that has parts of it in common with others.

/// An evidence field: name, and what it means.
pub(super) type Field = (&'static str, &'static str);

/// Lists of fields as one, in this order.
macro_rules! joined {
    ($($part:expr),+ $(,)?) => {{
        use $crate::diagnose::causes::evidence::{Field, count, join};
        const PARTS: &[&[Field]] = &[$(&$part),+];
        const ALL: [Field; count(PARTS)] = join(PARTS);
        &ALL
    }};
}
pub(super) use joined;

/// Fields of all parts.
pub(super) const fn count(parts: &[&[Field]]) -> usize {
    let (mut count, mut part) = (0, 0);
    while part < parts.len() {
        count += parts[part].len();
        part += 1;
    }
    count
}

/// The fields of all parts; `COUNT` is what [`count`] gives, else nothing is compiled.
pub(super) const fn join<const COUNT: usize>(parts: &[&[Field]]) -> [Field; COUNT] {
    assert!(count(parts) == COUNT);
    let mut all = [("", ""); COUNT];
    let (mut at, mut part) = (0, 0);
    while part < parts.len() {
        let mut field = 0;
        while field < parts[part].len() {
            all[at] = parts[part][field];
            at += 1;
            field += 1;
        }
        part += 1;
    }
    all
}
