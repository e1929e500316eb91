use simplicit::linalg::Matrix; use simplicit::statistics::*; use simplicit::solver::*; use simplicit::problem::*; use simplicit::problem::penalty::*; use simplicit::parallel::*;
fn read(p:&str)->Vec<f64>{std::fs::read(p).unwrap().chunks_exact(8).map(|c|f64::from_le_bytes(c.try_into().unwrap())).collect()}
fn main(){
 let (d,m,n)=(896usize,1000usize,112usize);
 let f=Matrix::from_vec(d,m,read("/tmp/w/F.bin")).unwrap().transposed(); let t=Matrix::from_vec(122,m,read("/tmp/w/T.bin")).unwrap().transposed();
 let steps:usize=std::env::args().nth(1).unwrap_or("40".into()).parse().unwrap();
 let t0=std::time::Instant::now();
 let st=Statistics::of(&f,&t).unwrap(); println!("gram {:?}",t0.elapsed());
 let de=Design::new(&st).unwrap(); println!("design {:?}",t0.elapsed());
 let l1=L1::new(1e-3).unwrap();
 let ps:Vec<RowProblem>=(0..122).map(|r|{let mut p=RowProblem::new(r,0.1*m as f64); if r<n{p.ball=Some(Ball::on_states(0.99,n,d));} p}).collect();
 let only:Option<usize>=std::env::args().nth(2).map(|x|x.parse().unwrap()); let ps:Vec<_>=match only{Some(k)=>vec![ps[k].clone()],None=>ps}; let set=SolverSettings{splitting_steps:steps,..Default::default()};
 let sol=solve_rows(&de,&l1,&ps,&set,Threads::one(),&Cancel::new(),|_|()).unwrap();
 let el=t0.elapsed(); if only.is_some(){println!("{el:?} {} {} {}",sol[0].primal,sol[0].relative_gap,sol[0].newton_steps);return;}
 for r in [0,5,20,30,60,80,111,112,118]{let s=&sol[r]; println!("{r} P {:.9} gap {:.2e} nnz {} split {} newton {} {:?} A {}",s.primal,s.relative_gap,s.weights.iter().filter(|w|**w!=0.0).count(),s.splitting_steps,s.newton_steps,s.status,s.weights[..n].iter().map(|x|x.abs()).sum::<f64>());}
 println!("total {el:?} worst {:.2e} newton mean {} max {} not solved {}",sol.iter().map(|s|s.relative_gap).fold(0.0,f64::max),sol.iter().map(|s|s.newton_steps).sum::<usize>() as f64/122.0,sol.iter().map(|s|s.newton_steps).max().unwrap(),sol.iter().filter(|s|s.status!=Status::Solved).count());
}
